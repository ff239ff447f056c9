#include "core/block_keys.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

void block_keys(std::span<const std::int32_t> tokens, std::size_t block_tokens, std::uint64_t seed,
                std::span<std::uint64_t> keys) noexcept {
    const std::size_t nbytes = block_tokens * sizeof(std::int32_t);
    std::uint64_t parent = seed;
    for (std::size_t i = 0; i < keys.size(); ++i) {
        parent = XXH3_64bits_withSeed(tokens.data() + i * block_tokens, nbytes, parent);
        keys[i] = parent;
    }
}

bool any_negative(std::span<const std::int32_t> tokens) noexcept {
    std::int32_t signs = 0;
    for (const std::int32_t token : tokens) signs |= token;  // no early end: it runs at memory speed
    return signs < 0;
}

}  // namespace poolweave
