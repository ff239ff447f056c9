// Reads msgpack without trusting it: every length is checked against the bytes that are left, nothing is allocated.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "core/error.hpp"

namespace poolweave {

class MsgpackReader {
  public:
    enum class Kind { kNil, kBool, kInt, kFloat, kText, kBytes, kArray, kMap, kExtension };

    // A value's head. Arrays and maps are followed by `size` items or pairs; texts, bytes and extensions carry `text`.
    struct Head {
        Kind kind = Kind::kNil;
        std::uint64_t integer = 0;    // two's complement when `negative`
        bool negative = false;
        std::size_t size = 0;
        std::string_view text{};
        double real = 0;
    };

    explicit MsgpackReader(std::string_view bytes) : bytes_(bytes) {}

    std::size_t offset() const noexcept { return at_; }
    bool done() const noexcept { return at_ == bytes_.size(); }
    std::string_view since(std::size_t start) const noexcept { return bytes_.substr(start, at_ - start); }

    Head next() {
        const std::uint8_t tag = byte();
        if (tag < 0x80) return {Kind::kInt, tag};
        if (tag >= 0xe0) return {Kind::kInt, static_cast<std::uint64_t>(static_cast<std::int8_t>(tag)), true};
        if (tag < 0x90) return container(Kind::kMap, tag & 15u);
        if (tag < 0xa0) return container(Kind::kArray, tag & 15u);
        if (tag < 0xc0) return blob(Kind::kText, tag & 31u);
        switch (tag) {
            case 0xc0: return {Kind::kNil};
            case 0xc2: case 0xc3: return {Kind::kBool, tag & 1u};
            case 0xc4: case 0xc5: case 0xc6: return blob(Kind::kBytes, big_endian(1u << (tag - 0xc4)));
            case 0xc7: case 0xc8: case 0xc9: return blob(Kind::kExtension, big_endian(1u << (tag - 0xc7)) + 1);
            case 0xca: return real(std::bit_cast<float>(static_cast<std::uint32_t>(big_endian(4))));
            case 0xcb: return real(std::bit_cast<double>(big_endian(8)));
            case 0xcc: case 0xcd: case 0xce: case 0xcf: return {Kind::kInt, big_endian(1u << (tag - 0xcc))};
            case 0xd0: case 0xd1: case 0xd2: case 0xd3: return signed_integer(1u << (tag - 0xd0));
            case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: return blob(Kind::kExtension, (1u << (tag - 0xd4)) + 1u);
            case 0xd9: case 0xda: case 0xdb: return blob(Kind::kText, big_endian(1u << (tag - 0xd9)));
            case 0xdc: case 0xdd: return container(Kind::kArray, big_endian(tag == 0xdc ? 2 : 4));
            case 0xde: case 0xdf: return container(Kind::kMap, big_endian(tag == 0xde ? 2 : 4));
            default: fail("a byte that starts no value");
        }
    }

    // Reads integers below 2**31 into `out` while the next values are such, at most `count`; says how many. Token ids
    // mix two widths at random: no branch depends on which.
    std::size_t take_tokens(std::int32_t* out, std::size_t count) noexcept {
        const auto* const base = reinterpret_cast<const std::uint8_t*>(bytes_.data());
        std::size_t at = at_, done = 0;
        for (; done < count && bytes_.size() - at >= 5; ++done) {
            const std::uint8_t* p = base + at;
            const std::uint32_t wide = load_big_endian<std::uint32_t>(p + 1);
            if (static_cast<std::uint8_t>(p[0] - 0xcd) <= 1) {
                const std::uint32_t is_short = 0xceu - p[0];
                const std::uint32_t token = wide >> 16 * is_short;
                if (token >= 0x80000000u) break;
                out[done] = static_cast<std::int32_t>(token);
                at += 5 - 2 * is_short;
            } else if (p[0] < 0x80) {
                out[done] = p[0];
                at += 1;
            } else if (p[0] == 0xcc) {
                out[done] = p[1];
                at += 2;
            } else {
                break;
            }
        }
        at_ = at;
        return done;
    }

    // The same for unsigned integers of 8 bytes: hashes.
    std::size_t take_words(std::uint64_t* out, std::size_t count) noexcept {
        const auto* const base = reinterpret_cast<const std::uint8_t*>(bytes_.data());
        std::size_t at = at_, done = 0;
        for (; done < count && bytes_.size() - at >= 9 && (base[at] == 0xcf || base[at] == 0xd3); ++done, at += 9) {
            out[done] = load_big_endian<std::uint64_t>(base + at + 1);
        }
        at_ = at;
        return done;
    }

    // Passes over nils, at most `count`; says how many.
    std::size_t take_nils(std::size_t count) noexcept {
        const std::size_t start = at_;
        while (at_ - start < count && at_ < bytes_.size() && bytes_[at_] == '\xc0') ++at_;
        return at_ - start;
    }

    // Passes over one value of any kind, however deeply nested.
    void skip() {
        for (std::size_t left = 1; left > 0; --left) {
            const Head head = next();
            if (head.kind == Kind::kArray) left += head.size;
            if (head.kind == Kind::kMap) left += 2 * head.size;
        }
    }

    [[noreturn]] void fail(const std::string& what) const {
        throw Error(Code::kMalformed, "malformed events: " + what + " at byte " + std::to_string(at_) + " of " +
                                          std::to_string(bytes_.size()), {static_cast<std::int64_t>(at_)});
    }

  private:
    template <class Word>
    static Word load_big_endian(const std::uint8_t* p) noexcept {
        Word word;
        std::memcpy(&word, p, sizeof word);
        if constexpr (std::endian::native == std::endian::big) return word;
        return static_cast<Word>(sizeof word == 4 ? __builtin_bswap32(static_cast<std::uint32_t>(word)) : __builtin_bswap64(word));
    }

    std::uint8_t byte() { return static_cast<std::uint8_t>(take(1)[0]); }

    std::string_view take(std::size_t count) {
        if (count > bytes_.size() - at_) fail("a value that ends after the message");
        at_ += count;
        return bytes_.substr(at_ - count, count);
    }

    std::uint64_t big_endian(std::size_t width) {
        std::uint64_t value = 0;
        for (const char c : take(width)) value = value << 8 | static_cast<std::uint8_t>(c);
        return value;
    }

    Head signed_integer(std::size_t width) {
        const std::uint64_t raw = big_endian(width);
        const std::size_t unused = 64 - 8 * width;
        const std::int64_t value = static_cast<std::int64_t>(raw << unused) >> unused;
        return {Kind::kInt, static_cast<std::uint64_t>(value), value < 0};
    }

    // Every item takes a byte at least, so a count above the bytes left is a lie.
    Head container(Kind kind, std::uint64_t size) {
        if (size * (kind == Kind::kMap ? 2 : 1) > bytes_.size() - at_) fail("a count above what follows");
        return {kind, 0, false, static_cast<std::size_t>(size)};
    }

    static Head real(double value) {
        Head head{Kind::kFloat};
        head.real = value;
        return head;
    }

    Head blob(Kind kind, std::uint64_t size) { return {kind, 0, false, 0, take(static_cast<std::size_t>(size))}; }

    std::string_view bytes_;
    std::size_t at_ = 0;
};

}  // namespace poolweave
