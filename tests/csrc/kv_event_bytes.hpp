// KV events as msgpack, written by hand: what publishers send, for the tests of those who read it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace poolweave {

inline std::string big_endian(std::uint64_t value, int width) {
    std::string bytes;
    for (int i = width; i-- > 0;) bytes += static_cast<char>(value >> 8 * i);
    return bytes;
}
inline std::string text(const std::string& s) { return "\xd9" + big_endian(s.size(), 1) + s; }
inline std::string number(std::uint64_t value) { return value < 128 ? big_endian(value, 1) : "\xcf" + big_endian(value, 8); }
inline std::string array(std::size_t size) { return "\xdd" + big_endian(size, 4); }
inline std::string numbers(const std::vector<std::uint64_t>& list) {
    std::string bytes = array(list.size());
    for (const std::uint64_t value : list) bytes += number(value);
    return bytes;
}
inline std::string batch(const std::vector<std::string>& events) {
    std::string bytes = "\x93\xcb" + big_endian(0x3ff8000000000000u, 8) + array(events.size());  // 1.5 s
    for (const std::string& event : events) bytes += event;
    return bytes + "\xc0";
}

struct Stored {
    std::vector<std::uint64_t> hashes;
    std::vector<std::uint64_t> tokens;
    std::string parent = "\xc0";
    std::uint64_t block_size = 2;
    std::string medium = "GPU";
    std::vector<std::string> more = {};  // names and values
    operator std::string() const {
        std::string bytes = "\xde" + big_endian(6 + more.size() / 2, 2) + text("type") + text("BlockStored") + text("block_hashes") +
                            numbers(hashes) + text("parent_block_hash") + parent + text("token_ids") + numbers(tokens) +
                            text("block_size") + number(block_size) + text("medium") + text(medium);
        for (std::size_t i = 0; i < more.size(); i += 2) bytes += text(more[i]) + more[i + 1];
        return bytes;
    }
};

inline std::string removed(const std::vector<std::uint64_t>& hashes, const std::string& medium = "GPU") {
    return "\x83" + text("type") + text("BlockRemoved") + text("block_hashes") + numbers(hashes) + text("medium") + text(medium);
}
inline std::string cleared() { return "\x81" + text("type") + text("AllBlocksCleared"); }

}  // namespace poolweave
