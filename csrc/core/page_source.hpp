// Where an arena's memory comes from, and how it is put behind addresses. All offsets and sizes are whole pages of the
// arena, in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poolweave {

class PageSource {
  public:
    PageSource() = default;
    PageSource(const PageSource&) = delete;
    PageSource& operator=(const PageSource&) = delete;
    virtual ~PageSource() = default;

    // Address space of `nbytes`, aligned to `alignment`, with no memory behind it. Throws kOs.
    virtual std::byte* reserve(std::uint64_t nbytes, std::uint64_t alignment) = 0;
    // It goes, and with it what is mapped there.
    virtual void unreserve(std::byte* base, std::uint64_t nbytes) noexcept = 0;
    // Put the memory [offset, offset + nbytes) behind `at`, read and write. Throws kConfig or kOs; then a part of it may be
    // there, until unmap() is called for all.
    virtual void map(std::byte* at, std::uint64_t offset, std::uint64_t nbytes) = 0;
    // No memory is behind these addresses any more; they stay reserved. False when it failed.
    virtual bool unmap(std::byte* at, std::uint64_t nbytes) noexcept = 0;
    // Memory that no range maps goes back to the system. Throws kOs.
    virtual void release(std::uint64_t offset, std::uint64_t nbytes) = 0;
    virtual std::uint64_t resident_bytes() const = 0;
    virtual bool huge_pages() const { return false; }
};

}  // namespace poolweave
