// Pages of host memory: an anonymous memfd, mapped with mmap. What is not mapped reads as zeros (writing there faults).
// Nothing is named in /dev/shm; the memory goes with the last process that has it open.
#pragma once

#include <memory>
#include <mutex>

#include "core/page_source.hpp"

namespace poolweave {

// Throws kOs.
int duplicate_fd(int fd);

class MemfdPages : public PageSource {
  public:
    // A file of `nbytes`, on huge pages of 2 MiB if `huge`. Throws kOs.
    static std::unique_ptr<MemfdPages> create(std::uint64_t nbytes, bool huge);
    // The file of another process, whose descriptor is duplicated. Throws kOs.
    static std::unique_ptr<MemfdPages> attach(int fd);
    ~MemfdPages() override;

    std::byte* reserve(std::uint64_t nbytes, std::uint64_t alignment) override;
    void unreserve(std::byte* base, std::uint64_t nbytes) noexcept override;
    void map(std::byte* at, std::uint64_t offset, std::uint64_t nbytes) override;
    bool unmap(std::byte* at, std::uint64_t nbytes) noexcept override;
    void release(std::uint64_t offset, std::uint64_t nbytes) override;
    std::uint64_t resident_bytes() const override;
    bool huge_pages() const override;

    int fd() const noexcept { return fd_; }
    // The same file opened read-only, for peers; owned by this.
    int readonly_fd();
    std::uint64_t nbytes() const;

  private:
    explicit MemfdPages(int fd) : fd_(fd) {}

    int fd_;
    std::mutex mutex_;  // guards readonly_fd_
    int readonly_fd_ = -1;
};

}  // namespace poolweave
