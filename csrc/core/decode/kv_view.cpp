#include "core/decode/kv_view.hpp"

#include <bit>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

std::uint16_t to_bf16(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // stay a NaN
    return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace

void KvView::store(std::int32_t slot, std::int64_t layer, std::int64_t part, std::int64_t token,
                   const float* values) const noexcept {
    const std::int64_t n = token_stride();
    const auto at = slot * slot_stride + layer * layer_stride + part * part_stride + token * n;
    if (dtype == Dtype::kF32) {
        std::memcpy(base + at * 4, values, static_cast<std::size_t>(n) * 4);
        return;
    }
    auto* out = reinterpret_cast<std::uint16_t*>(base) + at;
    for (std::int64_t i = 0; i < n; ++i) out[i] = to_bf16(values[i]);
}

void check_sequences(const KvView& kv, std::span<const Sequence> sequences) {
    for (std::size_t row = 0; row < sequences.size(); ++row) {
        const Sequence& sequence = sequences[row];
        const auto needed = static_cast<std::size_t>(sequence.position / kv.block_tokens + 1);
        if (sequence.position < 0 || sequence.slots.size() < needed)
            throw Error(Code::kConfig, "row " + std::to_string(row) + " at position " + std::to_string(sequence.position) +
                                           " has " + std::to_string(sequence.slots.size()) + " blocks");
        for (std::size_t i = 0; i < needed; ++i) {
            if (sequence.slots[i] < 0 || sequence.slots[i] >= kv.slots)
                throw Error(Code::kConfig, "row " + std::to_string(row) + " names slot " +
                                               std::to_string(sequence.slots[i]) + " of " + std::to_string(kv.slots));
        }
    }
}

}  // namespace poolweave::decode
