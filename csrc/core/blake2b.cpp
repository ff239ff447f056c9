#include "core/blake2b.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace poolweave {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

constexpr std::array<std::uint64_t, 8> kInitial{
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr std::uint8_t kSchedule[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

void mix(std::uint64_t& a, std::uint64_t& b, std::uint64_t& c, std::uint64_t& d, std::uint64_t x, std::uint64_t y) noexcept {
    a += b + x;
    d = std::rotr(d ^ a, 32);
    c += d;
    b = std::rotr(b ^ c, 24);
    a += b + y;
    d = std::rotr(d ^ a, 16);
    c += d;
    b = std::rotr(b ^ c, 63);
}

}  // namespace

Blake2b::Blake2b(std::span<const std::byte> key, std::size_t digest_bytes) noexcept : state_(kInitial) {
    state_[0] ^= 0x01010000 ^ (key.size() << 8) ^ digest_bytes;
    if (!key.empty()) {
        std::memcpy(buffer_.data(), key.data(), key.size());
        filled_ = kBlock;  // the key is a block of its own
    }
}

void Blake2b::update(std::span<const std::byte> data) noexcept {
    while (!data.empty()) {
        if (filled_ == kBlock) {  // the last block is compressed by digest(): so only when more follows
            total_ += kBlock;
            compress(false);
            filled_ = 0;
        }
        const std::size_t n = std::min(kBlock - filled_, data.size());
        std::memcpy(buffer_.data() + filled_, data.data(), n);
        filled_ += n;
        data = data.subspan(n);
    }
}

void Blake2b::digest(std::span<std::byte> out) noexcept {
    total_ += filled_;
    std::memset(buffer_.data() + filled_, 0, kBlock - filled_);
    compress(true);
    std::memcpy(out.data(), state_.data(), out.size());
}

void Blake2b::compress(bool last) noexcept {
    std::array<std::uint64_t, 16> m, v;
    std::memcpy(m.data(), buffer_.data(), kBlock);
    std::copy(state_.begin(), state_.end(), v.begin());
    std::copy(kInitial.begin(), kInitial.end(), v.begin() + 8);
    v[12] ^= total_;
    if (last) v[14] = ~v[14];
    for (unsigned round = 0; round < 12; ++round) {
        const auto& s = kSchedule[round % 10];
        for (unsigned i = 0; i < 4; ++i) mix(v[i], v[4 + i], v[8 + i], v[12 + i], m[s[2 * i]], m[s[2 * i + 1]]);
        for (unsigned i = 0; i < 4; ++i) {
            mix(v[i], v[4 + (i + 1) % 4], v[8 + (i + 2) % 4], v[12 + (i + 3) % 4], m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
        }
    }
    for (unsigned i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[8 + i];
}

}  // namespace poolweave
