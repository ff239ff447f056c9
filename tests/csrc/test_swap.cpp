// Copies between tiers: aggregated and layered geometry, neighbours joined, any number of threads.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/swap.hpp"

using poolweave::TierGeometry;

namespace {

constexpr std::size_t kSlots = 40;

TierGeometry geometry(std::vector<std::byte>& memory, bool layered, std::uint64_t planes, std::uint64_t plane_bytes) {
    if (layered) return {memory.data(), plane_bytes, kSlots * plane_bytes};
    return {memory.data(), planes * plane_bytes, plane_bytes};
}

std::byte* plane(const TierGeometry& g, std::int32_t slot, std::uint64_t index) {
    return g.base + static_cast<std::uint64_t>(slot) * g.slot_stride + index * g.plane_stride;
}

void blocks_arrive_whole(bool from_layered, bool to_layered, std::uint64_t plane_bytes, unsigned threads) {
    constexpr std::uint64_t kPlanes = 6;
    std::mt19937 random(static_cast<unsigned>(plane_bytes) + threads);
    std::vector<std::byte> source(kSlots * kPlanes * plane_bytes);
    std::vector<std::byte> target(source.size(), std::byte{0xee});
    for (std::size_t i = 0; i + 4 <= source.size(); i += 4) {
        const auto word = static_cast<std::uint32_t>(random());
        std::memcpy(&source[i], &word, 4);
    }
    const TierGeometry from = geometry(source, from_layered, kPlanes, plane_bytes);
    const TierGeometry to = geometry(target, to_layered, kPlanes, plane_bytes);
    std::vector<std::int32_t> from_slots(kSlots);
    std::iota(from_slots.begin(), from_slots.end(), 0);
    std::vector<std::int32_t> to_slots = from_slots;
    std::shuffle(from_slots.begin() + 10, from_slots.end(), random);  // the first ten are neighbours
    std::shuffle(to_slots.begin() + 10, to_slots.end(), random);
    from_slots.resize(30);
    to_slots.resize(30);
    poolweave::swap_blocks(from, to, from_slots, to_slots, kPlanes, plane_bytes, threads);
    for (std::size_t i = 0; i < from_slots.size(); ++i) {
        for (std::uint64_t p = 0; p < kPlanes; ++p) {
            CHECK(std::memcmp(plane(from, from_slots[i], p), plane(to, to_slots[i], p), plane_bytes) == 0);
        }
    }
    const std::vector<std::byte> blank(plane_bytes, std::byte{0xee});
    std::size_t untouched = 0;
    for (std::int32_t slot = 0; slot < static_cast<std::int32_t>(kSlots); ++slot) {
        if (std::find(to_slots.begin(), to_slots.end(), slot) != to_slots.end()) continue;
        for (std::uint64_t p = 0; p < kPlanes; ++p) {
            CHECK(std::memcmp(plane(to, slot, p), blank.data(), plane_bytes) == 0);
        }
        ++untouched;
    }
    CHECK(untouched == 10);
}

// Planes that lie anywhere, in an order of their own at each end.
void planes_arrive_each_at_its_own(std::uint64_t plane_bytes, unsigned threads) {
    constexpr std::size_t kPlanes = 5;
    std::mt19937 random(7);
    std::vector<std::vector<std::byte>> sources(kPlanes), targets(kPlanes);
    std::vector<TierGeometry> from, to;
    for (std::size_t p = 0; p < kPlanes; ++p) {
        sources[p].resize(kSlots * plane_bytes);
        for (std::byte& byte : sources[p]) byte = static_cast<std::byte>(random());
        targets[p].assign(kSlots * (plane_bytes + p), std::byte{0xee});  // strides that differ
        from.push_back({sources[p].data(), plane_bytes, 0});
        to.push_back({targets[p].data(), plane_bytes + p, 0});
    }
    const std::vector<std::int32_t> from_slots{3, 4, 5, 39, 0, 17}, to_slots{8, 9, 10, 1, 38, 2};
    poolweave::swap_planes(from, to, from_slots, to_slots, plane_bytes, threads);
    for (std::size_t p = 0; p < kPlanes; ++p) {
        std::size_t touched = 0;
        for (std::size_t i = 0; i < from_slots.size(); ++i) {
            CHECK(std::memcmp(plane(from[p], from_slots[i], 0), plane(to[p], to_slots[i], 0), plane_bytes) == 0);
        }
        for (const std::byte byte : targets[p]) touched += byte != std::byte{0xee};
        CHECK(touched <= from_slots.size() * plane_bytes);
    }
    poolweave::swap_planes({}, {}, {}, {}, plane_bytes, threads);
}

}  // namespace

int main() {
    for (const unsigned threads : {1u, 3u}) {
        planes_arrive_each_at_its_own(100, threads);
        planes_arrive_each_at_its_own(1 << 20, threads);
    }
    for (const bool from_layered : {false, true}) {
        for (const bool to_layered : {false, true}) {
            for (const unsigned threads : {0u, 3u}) {
                blocks_arrive_whole(from_layered, to_layered, 100, threads);
                blocks_arrive_whole(from_layered, to_layered, 48 << 10, threads);
            }
        }
    }
    return 0;
}
