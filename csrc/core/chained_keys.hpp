// The 128-bit names of a prompt's blocks outside the process: key i stands for all tokens up to the end of block i.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace poolweave {

using BlockKey = std::array<std::uint8_t, 16>;  // XXH3-128 in its canonical, big-endian form

// keys[i] = XXH3-128(key before it | tokens of block i as little-endian int32), the key before the first being
// `parent`. The same on every platform. `keys` has one entry a whole block.
void chained_keys(std::span<const std::int32_t> tokens, std::size_t block_tokens, const BlockKey& parent,
                  std::span<BlockKey> keys);

}  // namespace poolweave
