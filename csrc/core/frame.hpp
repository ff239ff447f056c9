// Frames of the control stream: a checked header, a bounded payload, and a sum over both.
//
//     magic u16 | version u8 | flags u8 | length u32 | check u32 | sum 16 bytes | payload        little-endian
//
// The header is checked as soon as it is there, so nothing is allocated for a length that a peer made up, and nothing
// is waited for that a damaged length promises: `check` is of the eight bytes before it. The sum covers a counter, the header and the payload: XXH3-128 against corruption or, under a key, BLAKE2b, so
// that frames cannot be forged, reordered or replayed. Knows no socket and no message.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace poolweave {

inline constexpr std::uint8_t kFrameVersion = 3;
inline constexpr std::size_t kGreetingLimit = 64u << 10;  // bytes a peer may send before it has said who it is
inline constexpr std::size_t kFrameLimit = 32u << 20;     // places, tokens and checksums of a prompt of 5 million tokens
inline constexpr std::size_t kFrameHead = 28;

using FrameKey = std::vector<std::byte>;  // empty: no key. At most 64 bytes
using Bytes = std::span<const std::byte>;

// One direction's outgoing frames. Not thread-safe.
class FrameEncoder {
  public:
    explicit FrameEncoder(FrameKey key = {});
    void rekey(FrameKey key);
    // What goes before `payload` on the wire. Throws kProtocol for a payload over kFrameLimit.
    std::array<std::byte, kFrameHead> head(Bytes payload);

  private:
    FrameKey key_;
    std::uint64_t count_ = 0;
};

// One direction's incoming bytes, in any pieces. Not thread-safe. Throws kProtocol; then close the stream.
class FrameDecoder {
  public:
    explicit FrameDecoder(std::size_t limit = kFrameLimit, FrameKey key = {});
    // From the next frame on; what is buffered already is decoded under the new key and limit.
    void rekey(FrameKey key, std::size_t limit);
    void feed(Bytes data);
    // The next whole payload, valid until the next call of feed() or next(); nothing when more bytes are needed.
    std::optional<Bytes> next();
    std::size_t buffered() const noexcept { return buffer_.size() - begin_; }

  private:
    void check(Bytes waiting) const;

    std::size_t limit_;
    FrameKey key_;
    std::uint64_t count_ = 0;
    std::vector<std::byte> buffer_;
    std::size_t begin_ = 0;  // bytes before it were decoded
};

}  // namespace poolweave
