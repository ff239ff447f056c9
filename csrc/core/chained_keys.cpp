#include "core/chained_keys.hpp"

#include <bit>
#include <cstring>
#include <vector>

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

namespace {

void copy_little_endian(std::uint8_t* to, const std::int32_t* tokens, std::size_t count) noexcept {
    if constexpr (std::endian::native == std::endian::little) {
        std::memcpy(to, tokens, count * sizeof(std::int32_t));
    } else {
        for (std::size_t i = 0; i < count; ++i) {
            const auto token = static_cast<std::uint32_t>(tokens[i]);
            for (std::size_t byte = 0; byte < 4; ++byte) to[4 * i + byte] = static_cast<std::uint8_t>(token >> 8 * byte);
        }
    }
}

}  // namespace

void chained_keys(std::span<const std::int32_t> tokens, std::size_t block_tokens, const BlockKey& parent,
                  std::span<BlockKey> keys) {
    std::vector<std::uint8_t> message(parent.size() + block_tokens * sizeof(std::int32_t));
    std::memcpy(message.data(), parent.data(), parent.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        copy_little_endian(message.data() + parent.size(), tokens.data() + i * block_tokens, block_tokens);
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits(message.data(), message.size()));
        std::memcpy(keys[i].data(), canonical.digest, keys[i].size());
        std::memcpy(message.data(), canonical.digest, keys[i].size());
    }
}

}  // namespace poolweave
