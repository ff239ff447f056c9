// Copies blocks between two tiers of one pool, or within one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/piece.hpp"

namespace poolweave {

// Where the planes of block `slot` lie: base + slot * slot_stride + plane * plane_stride.
struct TierGeometry {
    std::byte* base;
    std::uint64_t slot_stride;
    std::uint64_t plane_stride;
};

// What swap_blocks() copies, for memory that something else must copy.
std::vector<Piece> plan_swap(const TierGeometry& from, const TierGeometry& to, std::span<const std::int32_t> from_slots,
                             std::span<const std::int32_t> to_slots, std::uint64_t num_planes, std::uint64_t plane_bytes);

// Copy block from_slots[i] of `from` to to_slots[i] of `to`, `num_planes` planes of `plane_bytes` each. Aggregated blocks go
// as one piece, and neighbours as one run. The two lists must not share memory. Up to `threads` threads.
void swap_blocks(const TierGeometry& from, const TierGeometry& to, std::span<const std::int32_t> from_slots,
                 std::span<const std::int32_t> to_slots, std::uint64_t num_planes, std::uint64_t plane_bytes, unsigned threads);

// The same for blocks whose planes have bases of their own: plane i of every block moves from from[i] to to[i], of which
// the plane strides are not looked at.
void swap_planes(std::span<const TierGeometry> from, std::span<const TierGeometry> to, std::span<const std::int32_t> from_slots,
                 std::span<const std::int32_t> to_slots, std::uint64_t plane_bytes, unsigned threads);

}  // namespace poolweave
