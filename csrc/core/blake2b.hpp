// BLAKE2b with a key: sums that only holders of the key can make. Source: RFC 7693.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace poolweave {

class Blake2b {
  public:
    // `key` has at most 64 bytes, `digest_bytes` lies in [1, 64].
    Blake2b(std::span<const std::byte> key, std::size_t digest_bytes) noexcept;

    void update(std::span<const std::byte> data) noexcept;
    // The sum of all data into `out`, which has digest_bytes. Ends this object's use.
    void digest(std::span<std::byte> out) noexcept;

  private:
    static constexpr std::size_t kBlock = 128;

    void compress(bool last) noexcept;

    std::array<std::uint64_t, 8> state_;
    std::array<std::byte, kBlock> buffer_{};
    std::size_t filled_ = 0;
    std::uint64_t total_ = 0;  // bytes compressed: no message here comes near 2^64
};

}  // namespace poolweave
