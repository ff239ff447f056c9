// Chained keys of a prompt's blocks: key i names the whole prefix that ends with block i.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace poolweave {

// Writes one key for each whole block of `tokens`; `keys` holds tokens.size() / block_tokens of them.
// A key hashes its block's tokens under the key before it, the first one under `seed` (the namespace), so equal
// keys mean equal prefixes of one namespace, up to 64-bit collisions. The same on every platform of one byte order.
void block_keys(std::span<const std::int32_t> tokens, std::size_t block_tokens, std::uint64_t seed,
                std::span<std::uint64_t> keys) noexcept;

// Whether a token id is none: ids run from 0 on.
bool any_negative(std::span<const std::int32_t> tokens) noexcept;

}  // namespace poolweave
