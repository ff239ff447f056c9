// XXH3 64-bit checksums of memory that crosses a wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace poolweave {

// XXH3-64 of `nbytes` at `data`; the same on every platform.
std::uint64_t checksum(const void* data, std::size_t nbytes) noexcept;

// XXH3-128 of `head` and `tail` together, in its canonical (big-endian) form, into the 16 bytes of `out`.
void wide_checksum(std::span<const std::byte> head, std::span<const std::byte> tail, std::span<std::byte, 16> out) noexcept;

// The same 64-bit sum over data that comes in pieces. Reusable after reset().
class Hasher {
  public:
    Hasher();
    ~Hasher();
    Hasher(const Hasher&) = delete;
    Hasher& operator=(const Hasher&) = delete;

    void reset() noexcept;
    void update(const void* data, std::size_t nbytes) noexcept;
    // update(source, nbytes), and the bytes copied to `target` past the caches. They must not overlap.
    void copy(void* target, const void* source, std::size_t nbytes) noexcept;
    std::uint64_t digest() const noexcept;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace poolweave
