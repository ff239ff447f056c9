// A tier's KV as the executors see it: [slot, layer, part, block_tokens, heads, dim], in either order of planes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/decode/matrix.hpp"

namespace poolweave::decode {

// Strides are in elements. Tokens, heads and dims of one plane are contiguous. The memory is the pool's.
struct KvView {
    std::byte* base = nullptr;
    std::int64_t slots = 0, layers = 0, parts = 0, block_tokens = 0, heads = 0, dim = 0;
    std::int64_t slot_stride = 0, layer_stride = 0, part_stride = 0;
    Dtype dtype = Dtype::kF32;

    std::int64_t token_stride() const noexcept { return heads * dim; }

    // Where one part of a block lies.
    const void* plane(std::int32_t slot, std::int64_t layer, std::int64_t part) const noexcept {
        return base + (slot * slot_stride + layer * layer_stride + part * part_stride) * dtype_bytes(dtype);
    }
    std::int64_t plane_bytes() const noexcept { return block_tokens * token_stride() * dtype_bytes(dtype); }

    // Store all heads of one token; bf16 rounds to nearest even.
    void store(std::int32_t slot, std::int64_t layer, std::int64_t part, std::int64_t token,
               const float* values) const noexcept;
};

// One row of a batch: a token at `position`, whose KV and that of all before it lies in `slots`, a row of the view for
// each block of tokens.
struct Sequence {
    std::int32_t position = 0;
    std::span<const std::int32_t> slots;

    std::int64_t num_tokens() const noexcept { return static_cast<std::int64_t>(position) + 1; }
};

// Throws kConfig, naming the row, unless every block up to the position is there and lies in the view.
void check_sequences(const KvView& kv, std::span<const Sequence> sequences);

}  // namespace poolweave::decode
