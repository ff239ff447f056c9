#include "core/frame.hpp"

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "core/blake2b.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"

namespace poolweave {
namespace {

constexpr std::uint16_t kMagic = 0x5750;
constexpr std::uint8_t kSigned = 1;
constexpr std::size_t kHeaderBytes = 8, kCheckBytes = 4, kSumBytes = 16, kMostKey = 64;
constexpr std::size_t kCheckedBytes = kHeaderBytes + kCheckBytes;
constexpr std::size_t kMostKept = 1u << 20;  // a large frame's room is not kept for ever

struct Header {
    std::uint16_t magic;
    std::uint8_t version;
    std::uint8_t flags;
    std::uint32_t length;
};
static_assert(sizeof(Header) == kHeaderBytes && kCheckedBytes + kSumBytes == kFrameHead);

using Sum = std::array<std::byte, kSumBytes>;

[[noreturn]] void refuse(const std::string& what, std::vector<std::int64_t> numbers = {}) {
    throw Error(Code::kProtocol, what, std::move(numbers));
}

FrameKey checked(FrameKey key) {
    if (key.size() > kMostKey) throw Error(Code::kConfig, "a frame key has at most 64 bytes, got " + std::to_string(key.size()));
    return key;
}

// The low half of XXH3-64.
std::uint32_t check_of(Bytes header) noexcept { return static_cast<std::uint32_t>(checksum(header.data(), kHeaderBytes)); }

Sum sum_of(const FrameKey& key, std::uint64_t count, Bytes header, Bytes payload) {
    std::array<std::byte, 8 + kHeaderBytes> head;
    std::memcpy(head.data(), &count, 8);
    std::memcpy(head.data() + 8, header.data(), kHeaderBytes);
    Sum sum;
    if (key.empty()) {
        wide_checksum(head, payload, sum);
        return sum;
    }
    Blake2b state(key, kSumBytes);
    state.update(head);
    state.update(payload);
    state.digest(sum);
    return sum;
}

// Takes as long for sums that differ early as for those that differ late.
bool same(const Sum& ours, Bytes theirs) noexcept {
    std::byte different{0};
    for (std::size_t i = 0; i < kSumBytes; ++i) different |= ours[i] ^ theirs[i];
    return different == std::byte{0};
}

}  // namespace

FrameEncoder::FrameEncoder(FrameKey key) : key_(checked(std::move(key))) {}

void FrameEncoder::rekey(FrameKey key) {
    key_ = checked(std::move(key));
    count_ = 0;
}

std::array<std::byte, kFrameHead> FrameEncoder::head(Bytes payload) {
    if (payload.size() > kFrameLimit) {
        refuse("a message of " + std::to_string(payload.size()) + " bytes exceeds the limit of " +
                   std::to_string(kFrameLimit) + "; send fewer blocks at once",
               {static_cast<std::int64_t>(payload.size()), static_cast<std::int64_t>(kFrameLimit)});
    }
    const Header header{kMagic, kFrameVersion, key_.empty() ? std::uint8_t{0} : kSigned,
                        static_cast<std::uint32_t>(payload.size())};
    std::array<std::byte, kFrameHead> out;
    std::memcpy(out.data(), &header, kHeaderBytes);
    const std::uint32_t check = check_of(out);
    std::memcpy(out.data() + kHeaderBytes, &check, kCheckBytes);
    const Sum sum = sum_of(key_, count_, Bytes(out).first(kHeaderBytes), payload);
    std::memcpy(out.data() + kCheckedBytes, sum.data(), kSumBytes);
    ++count_;
    return out;
}

FrameDecoder::FrameDecoder(std::size_t limit, FrameKey key) : limit_(limit), key_(checked(std::move(key))) {}

void FrameDecoder::rekey(FrameKey key, std::size_t limit) {
    key_ = checked(std::move(key));
    limit_ = limit;
    count_ = 0;
}

void FrameDecoder::feed(Bytes data) {
    if (begin_ == buffer_.size()) {
        if (buffer_.capacity() > kMostKept) buffer_ = {};
        buffer_.clear();
        begin_ = 0;
    } else if (begin_ > buffer_.size() / 2) {
        buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(begin_));
        begin_ = 0;
    }
    buffer_.insert(buffer_.end(), data.begin(), data.end());
}

std::optional<Bytes> FrameDecoder::next() {
    const Bytes waiting = Bytes(buffer_).subspan(begin_);
    if (waiting.size() < kHeaderBytes) return std::nullopt;
    check(waiting);
    if (waiting.size() < kCheckedBytes) return std::nullopt;
    std::uint32_t length;
    std::memcpy(&length, waiting.data() + offsetof(Header, length), sizeof length);
    if (waiting.size() < kFrameHead + length) return std::nullopt;
    const Bytes payload = waiting.subspan(kFrameHead, length);
    if (!same(sum_of(key_, count_, waiting.first(kHeaderBytes), payload), waiting.subspan(kCheckedBytes, kSumBytes))) {
        refuse("the sum of a frame of " + std::to_string(length) + " bytes is wrong: " +
                   (key_.empty() ? "a corrupt stream" : "the two instances have different cluster secrets"),
               {length});
    }
    ++count_;
    begin_ += kFrameHead + length;
    return payload;
}

// Of the first eight bytes, then of all twelve: another version may lay out the rest differently.
void FrameDecoder::check(Bytes waiting) const {
    Header header;
    std::memcpy(&header, waiting.data(), kHeaderBytes);
    if (header.magic != kMagic) {
        refuse("a frame begins with " + std::to_string(header.magic) + ": not poolweave's protocol, or a corrupt stream");
    }
    if (header.version != kFrameVersion) {
        refuse("the peer speaks protocol version " + std::to_string(header.version) + ", this one " +
               std::to_string(kFrameVersion) + ": upgrade the older");
    }
    if (waiting.size() < kCheckedBytes) return;
    std::uint32_t theirs;
    std::memcpy(&theirs, waiting.data() + kHeaderBytes, kCheckBytes);
    if (theirs != check_of(waiting)) {
        refuse("the header of a frame that claims " + std::to_string(header.length) + " bytes fails its check: a corrupt stream",
               {header.length});
    }
    if (header.flags > kSigned) refuse("a frame has unknown flags " + std::to_string(header.flags));
    if ((header.flags == kSigned) == key_.empty()) {
        refuse("one instance has a cluster secret and the other has none: set `secret` on both");
    }
    if (header.length > limit_) {
        refuse("a frame claims " + std::to_string(header.length) + " bytes, over the limit of " + std::to_string(limit_),
               {header.length, static_cast<std::int64_t>(limit_)});
    }
}

}  // namespace poolweave
