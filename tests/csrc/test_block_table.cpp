// The block table: ownership, generations, loans and limbo, moves, limits; and random batches against a naive model.
#include <algorithm>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/block_table.hpp"
#include "core/error.hpp"

using poolweave::BlockTable;
using poolweave::Code;
using Ids = std::vector<std::uint64_t>;

namespace {

constexpr unsigned kHbm = 1;
constexpr unsigned kDram = 2;

Ids alloc(BlockTable& table, std::size_t n, unsigned mask = kHbm) {
    Ids out(n);
    CHECK(table.alloc(out, mask));
    return out;
}

struct Where {
    explicit Where(std::size_t n) : tiers(n), slots(n) {}
    poolweave::Places places() { return {tiers, slots}; }
    std::vector<std::uint8_t> tiers;
    std::vector<std::int32_t> slots;
};

std::vector<std::int32_t> slots_of(const BlockTable& table, const Ids& ids) {
    Where where(ids.size());
    table.locate(ids, where.places());
    return where.slots;
}

Ids indexed(BlockTable& table, std::size_t n, unsigned mask = kHbm) {
    const Ids ids = alloc(table, n, mask);
    table.seal(ids);
    table.index(ids);
    return ids;
}

void lowest_slots_come_first() {
    BlockTable table({200, 0});
    const Ids ids = alloc(table, 150);
    CHECK(slots_of(table, ids).front() == 0 && slots_of(table, ids).back() == 149);
    table.free(Ids{ids[140], ids[3], ids[70]});
    const Ids again = alloc(table, 4);
    CHECK((slots_of(table, again) == std::vector<std::int32_t>{3, 70, 140, 150}));
    Ids none;
    CHECK(table.alloc(none, kHbm));
    Ids many(50);
    CHECK(!table.alloc(many, kHbm));  // 49 are left
    CHECK(table.counts(0).free == 49 && table.longest_free_run(0) == 49);
    table.check();
}

void mixed_allocation_takes_the_fast_tier_first() {
    BlockTable table({3, 3});
    const Ids ids = alloc(table, 5, kHbm | kDram);
    Where where(5);
    table.locate(ids, where.places());
    CHECK((where.tiers == std::vector<std::uint8_t>{0, 0, 0, 1, 1}));
    std::vector<std::int32_t> rows(3);
    table.slots(Ids{ids[0], ids[1], ids[2]}, 0, rows);
    CHECK((rows == std::vector<std::int32_t>{0, 1, 2}));
    CHECK_THROWS(table.slots(Ids{ids[0], ids[1], ids[3]}, 0, rows), Code::kNotResident);
}

void wrong_handles_change_nothing() {
    BlockTable table({8, 0});
    const Ids ids = alloc(table, 4);
    table.free(Ids{ids[3]});
    const auto before = table.counts(0).free;
    CHECK_THROWS(table.free(Ids{ids[0], ids[3]}), Code::kStaleHandle);
    CHECK_THROWS(table.free(Ids{ids[0], ids[0]}), Code::kStaleHandle);  // one reference only
    CHECK_THROWS(table.free(Ids{ids[0], 0}), Code::kUnknownBlock);
    CHECK_THROWS(table.free(Ids{ids[0], ids[1] + (std::uint64_t{1} << 32)}), Code::kUnknownBlock);  // from the future
    CHECK_THROWS(table.free(Ids{ids[0], std::uint64_t{1} << 32 | 7}), Code::kUnknownBlock);         // id never used
    CHECK_THROWS(table.retain(Ids{ids[0], ~std::uint64_t{0}}), Code::kUnknownBlock);
    CHECK_THROWS(table.seal(Ids{ids[0], ids[3]}), Code::kStaleHandle);
    CHECK_THROWS(table.index(Ids{ids[0], ids[0]}), Code::kConfig);
    CHECK_THROWS(table.check_insertable(Ids{ids[0]}), Code::kNotSealed);
    CHECK_THROWS(table.unindex(Ids{ids[0]}), Code::kStaleHandle);
    CHECK(table.counts(0).free == before);
    std::vector<std::uint8_t> flags(1);
    table.flags(Ids{ids[0]}, flags);
    CHECK(flags[0] == 0);
    table.retain(Ids{ids[0], ids[0]});
    CHECK(table.free(Ids{ids[0], ids[0], ids[0]}) == 1);
    table.check();
}

void only_the_index_makes_a_block_evictable() {
    BlockTable table({4, 4});
    const Ids ids = indexed(table, 2);
    CHECK(!table.is_evictable(ids[0], kHbm | kDram) && table.counts(0).pinned == 2);
    CHECK(table.free(ids) == 2);
    CHECK(table.is_evictable(ids[0], kHbm) && !table.is_evictable(ids[0], kDram) && table.counts(0).historical == 2);
    CHECK_THROWS(table.free(Ids{ids[0]}), Code::kStaleHandle);  // the index's reference is not the caller's
    table.retain(Ids{ids[0]});
    CHECK(!table.is_evictable(ids[0], kHbm) && table.counts(0).historical == 1);
    CHECK(table.unindex(ids) == 1 && table.num_live() == 1);
    CHECK(table.free(Ids{ids[0]}) == 1 && table.num_live() == 0);
    CHECK(!table.is_evictable(ids[0], kHbm));
    table.check();
}

void a_place_on_loan_outlives_a_move() {
    BlockTable table({2, 2});
    const Ids ids = alloc(table, 1);
    Where loan(1);
    CHECK_THROWS(table.lend(ids, loan.places()), Code::kNotSealed);
    table.seal(ids);
    table.lend(ids, loan.places());
    CHECK(table.counts(0).leased == 1);
    CHECK(table.free(ids) == 0);                                // the loan keeps it
    CHECK_THROWS(table.free(ids), Code::kStaleHandle);
    Where from(1);
    std::vector<std::int32_t> to(1);
    CHECK(table.begin_move(ids, 1, from.places(), to));
    CHECK_THROWS(table.begin_move(ids, 1, from.places(), to), Code::kConfig);
    table.commit_move(ids, 1, to);
    CHECK(table.counts(0).limbo == 1 && table.counts(0).free == 1 && table.counts(0).leased == 1);
    Ids two(2);
    CHECK(!table.alloc(two, kHbm));                             // the old place still holds the bytes
    CHECK_THROWS(table.give_back(ids, std::vector<std::uint8_t>{1}, std::vector<std::int32_t>{to[0]}), Code::kStaleHandle);
    CHECK(table.give_back(ids, loan.tiers, loan.slots) == 1);
    CHECK(table.counts(0).limbo == 0 && table.num_live() == 0 && table.counts(0).free == 2 && table.counts(1).free == 2);
    CHECK_THROWS(table.give_back(ids, loan.tiers, loan.slots), Code::kStaleHandle);
    table.check();
}

void a_block_lent_twice_comes_back_twice() {
    BlockTable table({4, 0});
    const Ids ids = alloc(table, 2);
    table.seal(ids);
    const Ids twice{ids[0], ids[0], ids[1]};
    Where loan(3);
    table.lend(twice, loan.places());
    CHECK(table.counts(0).leased == 2);
    CHECK(table.give_back(twice, loan.tiers, loan.slots) == 0 && table.counts(0).leased == 0);
    table.lend(Ids{ids[0]}, loan.places());
    table.set_private(Ids{ids[1]});
    CHECK_THROWS(table.lend(Ids{ids[0], ids[1]}, loan.places()), Code::kPrivate);
    table.check();
    CHECK_THROWS(table.give_back(Ids{ids[0], ids[0]}, std::vector<std::uint8_t>{0, 0}, std::vector<std::int32_t>{0, 0}), Code::kStaleHandle);
    table.check();
}

void moves_keep_handles_and_can_be_undone() {
    BlockTable table({4, 2});
    const Ids ids = indexed(table, 3);
    table.free(ids);
    Where from(3);
    std::vector<std::int32_t> to(3);
    CHECK(!table.begin_move(ids, 1, from.places(), to));        // two slots only
    const Ids two{ids[0], ids[2]};
    CHECK(table.begin_move(two, 1, {std::span(from.tiers).first(2), std::span(from.slots).first(2)}, std::span(to).first(2)));
    CHECK(!table.is_evictable(ids[0], kHbm) && table.counts(1).free == 0 && table.counts(1).reserved == 2);
    table.check();
    table.abort_move(two, 1, std::span(to).first(2));
    CHECK(table.is_evictable(ids[0], kHbm) && table.counts(1).free == 2);
    CHECK_THROWS(table.commit_move(two, 1, std::span(to).first(2)), Code::kConfig);
    CHECK(table.begin_move(two, 1, {std::span(from.tiers).first(2), std::span(from.slots).first(2)}, std::span(to).first(2)));
    CHECK(table.unindex(Ids{ids[0]}) == 0);                     // given up meanwhile: freed when the move ends
    CHECK(table.commit_move(two, 1, std::span(to).first(2)) == 2);
    CHECK(table.num_live() == 2 && table.counts(1).free == 1 && table.is_evictable(ids[2], kDram));
    table.check();
}

void a_lowered_limit_takes_no_live_block() {
    BlockTable table({100, 0});
    Ids ids = alloc(table, 100);
    table.free(std::span(ids).first(50));
    table.set_limit(0, 20);
    CHECK(table.counts(0).free == 0 && table.counts(0).overhang == 50 && table.overhang(0).front() == 50);
    Ids one(1);
    CHECK(!table.alloc(one, kHbm));                             // 50 are in use, 20 allowed
    table.free(std::span(ids).subspan(50, 45));
    CHECK(table.counts(0).free == 15 && table.counts(0).overhang == 5);
    const Ids low = alloc(table, 15);
    CHECK(slots_of(table, low).back() == 14);
    table.seal(std::span(ids).last(5));
    table.index(std::span(ids).last(5));
    table.free(std::span(ids).last(5));
    CHECK(table.evictable_overhang(0) == Ids(ids.end() - 5, ids.end()));
    Where from(5);
    std::vector<std::int32_t> to(5);
    CHECK(table.begin_move(std::span(ids).last(5), 0, from.places(), to));  // within the tier, below the limit
    table.commit_move(std::span(ids).last(5), 0, to);
    CHECK(table.counts(0).overhang == 0 && table.counts(0).free == 0 && to.back() == 19);
    table.set_limit(0, 100);
    CHECK(table.counts(0).free == 80);
    table.set_limit(0, 1000);
    CHECK(alloc(table, 980).size() == 980);
    CHECK_THROWS(table.set_limit(0, 1u << 30), Code::kConfig);
    table.check();
}

void free_sets_of_all_sizes_agree_with_a_vector() {
    std::mt19937 random(3);
    for (const std::size_t size : {1, 63, 64, 65, 4096, 4097, 300000}) {
        poolweave::SlotSet set;
        set.grow(size / 2 + 1);
        set.grow(size);
        std::vector<bool> model(size);
        for (int step = 0; step < 2000; ++step) {
            const std::size_t member = random() % size;
            if (model[member]) set.erase(member);
            else set.insert(member);
            model[member] = !model[member];
        }
        const auto count = static_cast<std::size_t>(std::count(model.begin(), model.end(), true));
        CHECK(set.count() == count);
        std::size_t run = 0;
        std::size_t longest = 0;
        for (std::size_t i = 0; i < size; ++i) {
            CHECK(set.contains(i) == model[i]);
            run = model[i] ? run + 1 : 0;
            longest = std::max(longest, run);
        }
        CHECK(set.longest_run() == longest);
        std::vector<std::uint32_t> taken(count);
        set.take_lowest(count, taken.data());
        for (std::size_t i = 0, next = 0; i < size; ++i) CHECK(!model[i] || taken[next++] == i);
        CHECK(set.count() == 0);
    }
}

// Random batches against a model that keeps one number a block: the callers' references, and whether it is indexed.
void random_batches_agree_with_a_model() {
    std::mt19937 random(11);
    BlockTable table({24, 16});
    struct Truth { int refs; bool index; };
    std::map<std::uint64_t, Truth> model;
    Ids dead{0, ~std::uint64_t{0}};
    for (int step = 0; step < 20000; ++step) {
        const std::size_t n = random() % 4;
        Ids batch;
        for (std::size_t i = 0; i < n; ++i) {
            const bool wrong = model.empty() || random() % 8 == 0;
            batch.push_back(wrong ? dead[random() % dead.size()] : std::next(model.begin(), random() % model.size())->first);
        }
        std::map<std::uint64_t, Truth> after = model;
        bool valid = true;
        const auto apply = [&](auto change) {
            for (const std::uint64_t id : batch) valid = valid && after.contains(id) && change(after[id]);
        };
        const auto settle = [&](auto call) {
            bool threw = false;
            try { call(); } catch (const poolweave::Error&) { threw = true; }
            CHECK(threw == !valid);
            if (!valid) return;
            model = after;
            std::erase_if(model, [&dead](const auto& entry) {
                const bool gone = entry.second.refs == 0 && !entry.second.index;
                if (gone) dead.push_back(entry.first);
                return gone;
            });
        };
        switch (random() % 6) {
            case 0: {
                Ids out(random() % 6);
                const bool room = table.counts(0).free + table.counts(1).free >= out.size();
                CHECK(table.alloc(out, kHbm | kDram) == room);
                for (const std::uint64_t id : out) {
                    if (room) CHECK(model.emplace(id, Truth{1, false}).second);
                }
                break;
            }
            case 1:
                apply([](Truth& t) { return t.refs-- > 0; });
                settle([&] { table.free(batch); });
                break;
            case 2:
                apply([](Truth& t) { return ++t.refs > 0; });
                settle([&] { table.retain(batch); });
                break;
            case 3:
                apply([](Truth& t) { return !std::exchange(t.index, true); });
                settle([&] { table.seal(batch), table.index(batch); });
                break;
            case 4:
                apply([](Truth& t) { return std::exchange(t.index, false); });
                settle([&] { table.unindex(batch); });
                break;
            default: table.set_limit(random() % 2, static_cast<std::uint32_t>(8 + random() % 24)); break;
        }
        if (step % 50 == 0) table.check();
        CHECK(table.num_live() == model.size());
        std::uint64_t evictable = 0;
        for (const auto& [id, truth] : model) evictable += truth.index && truth.refs == 0;
        CHECK(table.counts(0).historical + table.counts(1).historical == evictable);
    }
    table.check();
}

void threads_allocate_and_free_at_once() {
    BlockTable table({300, 100});
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&table, t] {
            std::mt19937 random(t);
            for (int step = 0; step < 2000; ++step) {
                Ids ids(random() % 100);
                if (!table.alloc(ids, kHbm | kDram)) continue;
                table.seal(ids);
                table.index(ids);
                CHECK(ids.empty() || !table.is_evictable(ids[0], kHbm | kDram));
                table.free(ids);
                table.unindex(ids);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(table.num_live() == 0 && table.counts(0).free == 300 && table.counts(1).free == 100);
    table.check();
}

void a_million_blocks_fill_and_empty() {
    BlockTable table({1'000'000, 0});
    Ids ids = alloc(table, 1'000'000);
    CHECK(ids.back() == (std::uint64_t{1} << 32 | 999'999));
    CHECK(table.free(ids) == 1'000'000);
    CHECK(table.num_live() == 0 && table.longest_free_run(0) == 1'000'000);
}

}  // namespace

int main() {
    lowest_slots_come_first();
    mixed_allocation_takes_the_fast_tier_first();
    wrong_handles_change_nothing();
    only_the_index_makes_a_block_evictable();
    a_place_on_loan_outlives_a_move();
    a_block_lent_twice_comes_back_twice();
    moves_keep_handles_and_can_be_undone();
    a_lowered_limit_takes_no_live_block();
    free_sets_of_all_sizes_agree_with_a_vector();
    random_batches_agree_with_a_model();
    threads_allocate_and_free_at_once();
    a_million_blocks_fill_and_empty();
    return 0;
}
