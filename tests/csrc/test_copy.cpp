// Extents against plain loops, guarded copies, hashes, and what must be refused.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/checksum.hpp"
#include "core/copy.hpp"
#include "core/error.hpp"
#include "core/extents.hpp"
#include "core/stream_copy.hpp"

using namespace poolweave;

namespace {

// One tier of memory: planes x rows a block, in one of three orders.
struct Tier {
    enum Order { kAggregated, kLayered, kTokenMajor };
    Tier(Order order, std::uint32_t slots, std::uint32_t planes, std::uint32_t rows, std::uint64_t row_bytes)
        : bytes(std::size_t{slots} * planes * rows * row_bytes) {
        grid = {reinterpret_cast<std::uintptr_t>(bytes.data()), bytes.size(), 0, 0, 0, row_bytes, slots, planes, rows};
        const std::uint64_t plane = rows * row_bytes, block = planes * plane;
        if (order == kAggregated) {
            grid.slot_stride = block, grid.plane_stride = plane, grid.row_stride = row_bytes;
        } else if (order == kLayered) {
            grid.slot_stride = plane, grid.plane_stride = slots * plane, grid.row_stride = row_bytes;
        } else {
            grid.slot_stride = block, grid.plane_stride = row_bytes, grid.row_stride = planes * row_bytes;
        }
    }
    unsigned char* at(std::uint64_t slot, std::uint64_t plane, std::uint64_t row) {
        return bytes.data() + slot * grid.slot_stride + plane * grid.plane_stride + row * grid.row_stride;
    }
    void fill(unsigned seed) {
        std::mt19937 random(seed);
        for (auto& one : bytes) one = static_cast<unsigned char>(random());
    }
    std::vector<unsigned char> bytes;
    Grid grid;
};

Extents extents(const Tier& tier, const std::vector<std::int32_t>& slots, const std::vector<Window>& windows = {}) {
    const std::vector<std::uint8_t> tiers(slots.size(), 0);
    return Extents(std::span(&tier.grid, 1), tiers, slots, windows);
}

void every_order_onto_every_order() {
    const std::vector<std::int32_t> from_slots{3, 0, 4}, to_slots{1, 2, 5};
    for (auto a : {Tier::kAggregated, Tier::kLayered, Tier::kTokenMajor}) {
        for (auto b : {Tier::kAggregated, Tier::kLayered, Tier::kTokenMajor}) {
            for (unsigned threads : {1u, 3u}) {
                Tier source(a, 6, 4, 5, 24), target(b, 6, 4, 5, 24);
                source.fill(7);
                const Extents from = extents(source, from_slots), to = extents(target, to_slots);
                std::vector<std::uint64_t> hashes(3), again(3);
                CHECK(copy_blocks(from, to, 0, 3, threads, {}, hashes.data()) == Outcome::kDone);
                hash_blocks(from, 0, 3, threads, again.data());
                CHECK(hashes == again);
                for (std::size_t i = 0; i < 3; ++i) {
                    for (unsigned p = 0; p < 4; ++p) {
                        for (unsigned r = 0; r < 5; ++r) {
                            CHECK(std::memcmp(source.at(from_slots[i], p, r), target.at(to_slots[i], p, r), 24) == 0);
                        }
                    }
                }
            }
        }
    }
}

void windows_move_their_part_only() {
    Tier source(Tier::kAggregated, 2, 4, 3, 32), target(Tier::kLayered, 2, 2, 3, 16);
    source.fill(1);
    // Planes 1 and 2, bytes [8, 16) of each row, into planes 0 and 1, bytes [4, 12).
    const Extents from = extents(source, {1}, {{1, 2, 8, 8}}), to = extents(target, {0}, {{0, 2, 4, 8}});
    CHECK(from.nbytes() == 2 * 3 * 8 && from.nbytes() == to.nbytes());
    CHECK(copy_blocks(from, to, 0, 1, 1, {}, nullptr) == Outcome::kDone);
    std::size_t written = 0;
    for (unsigned p = 0; p < 2; ++p) {
        for (unsigned r = 0; r < 3; ++r) CHECK(std::memcmp(source.at(1, p + 1, r) + 8, target.at(0, p, r) + 4, 8) == 0);
    }
    for (auto one : target.bytes) written += one != 0;
    CHECK(written <= from.nbytes());
}

void runs_are_merged() {
    Tier aggregated(Tier::kAggregated, 4, 4, 2, 8), layered(Tier::kLayered, 4, 4, 2, 8);
    CHECK(extents(aggregated, {0, 1, 3}).num_runs() == 3);
    CHECK(extents(aggregated, {0, 1, 3}).num_coalesced() == 2);
    CHECK(extents(layered, {0, 1}).num_runs() == 8);
    CHECK(extents(layered, {}).num_coalesced() == 0);
}

void a_lease_that_ends_stops_the_copy() {
    Tier source(Tier::kAggregated, 4, 2, 16, 64), target(Tier::kAggregated, 4, 2, 16, 64);
    const Extents from = extents(source, {0, 1}), to = extents(target, {2, 3});
    std::atomic<std::uint64_t> word{42};
    Abort abort;
    CHECK(copy_blocks(from, to, 0, 2, 1, {&word, 42, &abort}, nullptr) == Outcome::kDone);
    word = 0;
    CHECK(copy_blocks(from, to, 0, 2, 1, {&word, 42, &abort}, nullptr) == Outcome::kRevoked);
    word = 43;  // the word serves another offer by now
    CHECK(copy_blocks(from, to, 0, 2, 1, {&word, 42, &abort}, nullptr) == Outcome::kRevoked);
    word = 42;
    abort.set();
    abort.set();
    CHECK(copy_blocks(from, to, 0, 2, 1, {&word, 42, &abort}, nullptr) == Outcome::kAborted);
}

// A writer that follows the rule (word first, bytes after) never gets torn bytes past the check.
void no_copy_is_valid_after_its_owner_wrote() {
    constexpr std::uint64_t kBytes = 1u << 16;
    std::vector<std::atomic<std::uint64_t>> source(kBytes / 8);  // atomics: the race is the point, not undefined
    std::atomic<std::uint64_t> word{1};
    std::vector<std::uint64_t> target(kBytes / 8);
    for (int round = 0; round < 200; ++round) {
        for (auto& one : source) one.store(7, std::memory_order_relaxed);
        word.store(1);
        std::thread owner([&] {
            word.store(0);
            for (auto& one : source) one.store(9, std::memory_order_relaxed);
        });
        for (std::size_t i = 0; i < target.size(); ++i) target[i] = source[i].load(std::memory_order_relaxed);
        const bool valid = holds({&word, 1, nullptr});
        owner.join();
        if (!valid) continue;
        for (std::uint64_t one : target) CHECK(one == 7);
    }
}

void large_copies_use_threads() {
    Tier source(Tier::kAggregated, 2, 1, 1, 24u << 20), target(Tier::kAggregated, 2, 1, 1, 24u << 20);
    std::memset(source.bytes.data(), 5, source.bytes.size());
    const Extents from = extents(source, {0, 1}), to = extents(target, {1, 0});
    CHECK(copy_blocks(from, to, 0, 2, 4, {}, nullptr) == Outcome::kDone);
    CHECK(source.bytes == target.bytes);
    std::vector<std::uint64_t> hashes(1);
    CHECK(copy_blocks(from, to, 1, 1, 4, {}, hashes.data()) == Outcome::kDone);
    CHECK(hashes[0] == checksum(source.bytes.data(), 24u << 20));
}

void streamed_copies_are_whole_at_any_alignment() {
    std::vector<unsigned char> source(20000), target(20000);
    std::mt19937 random(2);
    for (auto& one : source) one = static_cast<unsigned char>(random());
    for (std::size_t from : {0u, 1u, 15u, 64u}) {
        for (std::size_t to : {0u, 3u, 16u, 63u}) {
            for (std::size_t n : {0u, 1u, 4095u, 4096u, 4097u, 4160u, 10007u}) {
                std::fill(target.begin(), target.end(), 0);
                stream_copy(target.data() + to, source.data() + from, n);
                CHECK(std::memcmp(target.data() + to, source.data() + from, n) == 0);
                CHECK(to == 0 || target[to - 1] == 0);
                CHECK(target[to + n] == 0);
            }
        }
    }
}

void what_does_not_fit_is_refused() {
    Tier tier(Tier::kAggregated, 4, 2, 2, 8), other(Tier::kAggregated, 4, 2, 2, 16);
    CHECK_THROWS(extents(tier, {4}), Code::kTransfer);
    CHECK_THROWS(extents(tier, {-1}), Code::kTransfer);
    const std::vector<std::uint8_t> second{1};
    const std::vector<std::int32_t> slot{0};
    CHECK_THROWS(Extents(std::span(&tier.grid, 1), second, slot, {}), Code::kTransfer);
    CHECK_THROWS(Extents(std::span(&tier.grid, 1), {}, slot, {}), Code::kConfig);
    const std::vector<Window> bad[] = {{{2, 1, 0, 8}}, {{0, 3, 0, 8}}, {{0, 1, 4, 8}}, {{0, 1, 9, 1}}, {{0, 0, 0, 8}}};
    for (const auto& windows : bad) CHECK_THROWS(extents(tier, {0}, windows), Code::kConfig);
    const std::vector<std::uint8_t> names{4, 2};
    const std::vector<Grid> grids{tier.grid, other.grid};
    const Tiers tiers(names, grids);
    CHECK(tiers.extents(std::vector<std::uint8_t>{2}, slot, {}).nbytes() == 2 * 2 * 16);
    CHECK_THROWS(tiers.extents(std::vector<std::uint8_t>{3}, slot, {}), Code::kTransfer);
    CHECK_THROWS(Tiers(std::vector<std::uint8_t>{4, 4}, grids), Code::kConfig);
    CHECK_THROWS(Tiers(std::vector<std::uint8_t>{4}, grids), Code::kConfig);
    CHECK_THROWS(Tiers(std::vector<std::uint8_t>{4, 255}, grids), Code::kConfig);
    Grid grid = tier.grid;
    grid.nbytes -= 1;
    CHECK_THROWS(grid.validate(), Code::kConfig);
    grid = tier.grid;
    grid.slot_stride = ~std::uint64_t{0} / 2;  // would wrap around 64 bits
    CHECK_THROWS(grid.validate(), Code::kConfig);
    CHECK_THROWS(copy_blocks(extents(tier, {0}), extents(other, {0}), 0, 1, 1, {}, nullptr), Code::kConfig);
    CHECK_THROWS(copy_blocks(extents(tier, {0}), extents(tier, {1}), 0, 2, 1, {}, nullptr), Code::kConfig);
    CHECK(copy_blocks(extents(tier, {}), extents(tier, {}), 0, 0, 2, {}, nullptr) == Outcome::kDone);
}

}  // namespace

int main() {
    every_order_onto_every_order();
    windows_move_their_part_only();
    runs_are_merged();
    a_lease_that_ends_stops_the_copy();
    no_copy_is_valid_after_its_owner_wrote();
    large_copies_use_threads();
    streamed_copies_are_whole_at_any_alignment();
    what_does_not_fit_is_refused();
}
