#include "core/swap.hpp"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "core/stream_copy.hpp"

namespace poolweave {
namespace {

constexpr std::uint64_t kBytesPerThread = 4u << 20;  // less is not worth a thread's start of about 20 us
constexpr std::uint64_t kStreamedTotal = 2u << 20;   // a copy of this size does not stay in a cache anyway

// Appends all pieces, neighbours joined.
void plan(std::vector<Piece>& pieces, const TierGeometry& from, const TierGeometry& to, std::span<const std::int32_t> from_slots,
          std::span<const std::int32_t> to_slots, std::uint64_t num_planes, std::uint64_t plane_bytes) {
    const bool whole = from.plane_stride == plane_bytes && to.plane_stride == plane_bytes;
    const std::uint64_t planes = whole ? 1 : num_planes;
    const std::uint64_t nbytes = whole ? num_planes * plane_bytes : plane_bytes;
    for (std::uint64_t plane = 0; plane < planes; ++plane) {
        for (std::size_t i = 0; i < from_slots.size(); ++i) {
            std::byte* const target = to.base + static_cast<std::uint64_t>(to_slots[i]) * to.slot_stride + plane * to.plane_stride;
            const std::byte* const source =
                from.base + static_cast<std::uint64_t>(from_slots[i]) * from.slot_stride + plane * from.plane_stride;
            if (!pieces.empty()) {
                Piece& last = pieces.back();
                if (last.to + last.nbytes == target && last.from + last.nbytes == source) {
                    last.nbytes += nbytes;
                    continue;
                }
            }
            pieces.push_back({target, source, nbytes});
        }
    }
}

// The bytes [begin, end) of all pieces laid end to end.
void copy_span(const std::vector<Piece>& pieces, std::uint64_t begin, std::uint64_t end, bool streamed) {
    std::uint64_t at = 0;
    for (const Piece& piece : pieces) {
        const std::uint64_t first = std::max(begin, at);
        const std::uint64_t last = std::min(end, at + piece.nbytes);
        if (first < last && streamed) stream_copy(piece.to + (first - at), piece.from + (first - at), last - first);
        else if (first < last) std::memcpy(piece.to + (first - at), piece.from + (first - at), last - first);
        at += piece.nbytes;
    }
}

void copy_all(const std::vector<Piece>& pieces, std::uint64_t total, bool streamed, unsigned threads) {
    const std::uint64_t parts = std::clamp<std::uint64_t>(total / kBytesPerThread, 1, std::max(threads, 1u));
    const auto bound = [&](std::uint64_t part) { return part == parts ? total : total / parts * part / 64 * 64; };
    const auto copy = [&](std::uint64_t part) { copy_span(pieces, bound(part), bound(part + 1), streamed); };
    std::vector<std::jthread> workers;
    for (std::uint64_t part = 1; part < parts; ++part) {
        try {
            workers.emplace_back(copy, part);
        } catch (const std::system_error&) {
            copy(part);  // no thread to be had: slower, not wrong
        }
    }
    copy(0);
}

}  // namespace

std::vector<Piece> plan_swap(const TierGeometry& from, const TierGeometry& to, std::span<const std::int32_t> from_slots,
                             std::span<const std::int32_t> to_slots, std::uint64_t num_planes, std::uint64_t plane_bytes) {
    std::vector<Piece> pieces;
    pieces.reserve(num_planes * from_slots.size());
    plan(pieces, from, to, from_slots, to_slots, num_planes, plane_bytes);
    return pieces;
}

void swap_blocks(const TierGeometry& from, const TierGeometry& to, std::span<const std::int32_t> from_slots,
                 std::span<const std::int32_t> to_slots, std::uint64_t num_planes, std::uint64_t plane_bytes, unsigned threads) {
    const std::vector<Piece> pieces = plan_swap(from, to, from_slots, to_slots, num_planes, plane_bytes);
    const std::uint64_t total = from_slots.size() * num_planes * plane_bytes;
    copy_all(pieces, total, total >= kStreamedTotal, threads);
}

void swap_planes(std::span<const TierGeometry> from, std::span<const TierGeometry> to, std::span<const std::int32_t> from_slots,
                 std::span<const std::int32_t> to_slots, std::uint64_t plane_bytes, unsigned threads) {
    std::vector<Piece> pieces;
    pieces.reserve(from.size() * from_slots.size());
    for (std::size_t i = 0; i < from.size(); ++i) plan(pieces, from[i], to[i], from_slots, to_slots, 1, plane_bytes);
    const std::uint64_t each = from_slots.size() * plane_bytes;
    copy_all(pieces, from.size() * each, each >= kStreamedTotal, threads);
}

}  // namespace poolweave
