// Guests of a range: another range's pages shown behind its own, held in the ledger as long as a block in them is taken.
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/range.hpp"

using poolweave::Arena;
using poolweave::Code;
using poolweave::Range;

namespace {

constexpr std::uint64_t kPage = 64 << 10;
constexpr std::uint64_t kPages = 12;                 // of the lender, and of each window
constexpr std::uint64_t kBlock = kPage * 3 / 2;      // two blocks share a page, or lie in two
constexpr std::int32_t kRows = kPages * kPage / kBlock;

// One process's part of an arena: as lender and as guest.
struct Part {
    explicit Part(std::shared_ptr<Arena> joined) : arena(std::move(joined)), range(arena, kPages * kPage, false, 2 * kPages * kPage) {
        table = {static_cast<std::uint32_t*>(mmap(nullptr, 3 * kPages * 4, PROT_READ, MAP_SHARED, range.table_fd(), 0)), kPages};
    }
    ~Part() { munmap(const_cast<std::uint32_t*>(table.data()), 3 * kPages * 4); }

    std::vector<std::uint8_t> guests_of(std::vector<std::int32_t> rows) {
        std::vector<std::uint8_t> out(rows.size(), 7);
        range.have_guests(rows, kBlock, out);
        return out;
    }

    std::shared_ptr<Arena> arena;
    Range range;
    std::span<const std::uint32_t> table;
};

struct Pair {
    Pair() : lender(Arena::create(64 * kPage, 64 * kPage, kPage)), guest(Arena::attach(lender.arena->data_fd(), lender.arena->ledger_fd())) {
        lender.range.map(0, kPages);
        for (std::int32_t row = 0; row < kRows; ++row) std::memset(lender.range.data() + row * kBlock, row + 1, kBlock);
    }

    // Rows of the lender, shown in the guest's first window.
    bool take(std::vector<std::int32_t> rows) {
        for (std::int32_t& row : rows) row += kRows;
        return guest.range.take_guests(lender.arena->ledger().self(), rows, kBlock, kPages, lender.table);
    }
    void drop(std::vector<std::int32_t> rows) {
        for (std::int32_t& row : rows) row += kRows;
        guest.range.drop_guests(rows, kBlock);
    }

    Part lender, guest;
};

void taken_blocks_show_what_the_lender_has() {
    Pair both;
    CHECK(both.take({0, 1, 5}));
    const std::byte* const seen = both.guest.range.data() + kPages * kPage;
    CHECK(seen[0] == std::byte{1} && seen[2 * kBlock - 1] == std::byte{2} && seen[5 * kBlock] == std::byte{6});
    both.lender.range.data()[5 * kBlock] = std::byte{99};
    CHECK(seen[5 * kBlock] == std::byte{99});
    CHECK(seen[7 * kBlock] == std::byte{0});
    both.guest.range.check();
    both.drop({0, 1, 5});
    CHECK(seen[0] == std::byte{0});
    both.guest.range.check();
    both.lender.arena->check();
}

void a_page_has_a_guest_until_its_last_block_is_dropped() {
    Pair both;
    CHECK(both.take({0}));
    CHECK(both.take({0, 2}));  // each taken once more
    // Blocks 0 and 1 meet in page 1, blocks 2 and 3 in page 4.
    CHECK(both.lender.guests_of({0, 1, 2, 3, 4}) == (std::vector<std::uint8_t>{1, 1, 1, 1, 0}));
    both.drop({0, 2});
    CHECK(both.lender.guests_of({0, 1, 2, 3, 4}) == (std::vector<std::uint8_t>{1, 1, 0, 0, 0}));
    CHECK(both.lender.guests_of({}).empty());
    both.drop({0});
    CHECK(both.lender.guests_of({0, 1, 7}) == (std::vector<std::uint8_t>{0, 0, 0}));
    both.guest.range.check();
}

void what_a_guest_holds_outlives_its_owner() {
    Pair both;
    CHECK(both.take({0}));
    both.lender.range.unmap(0, kPages);
    CHECK(both.guest.arena->stats().orphan_bytes == 2 * kPage);
    CHECK((both.guest.range.data() + kPages * kPage)[0] == std::byte{1});
    CHECK(!both.take({1}));  // it has gone: all or none, and nothing is left of the try
    both.guest.range.check();
    both.drop({0});
    CHECK(both.guest.arena->stats().orphan_bytes == 0);
    both.lender.arena->check();
}

void places_that_are_none_are_refused() {
    Pair both;
    CHECK(!both.take({kRows}));  // the lender's table ends before
    CHECK_THROWS(both.take({-1}), Code::kConfig);  // among its own pages
    CHECK_THROWS(both.take({2 * kRows}), Code::kConfig);
    both.guest.range.check();
}

void threads_take_and_drop_at_once() {
    Pair both;
    std::vector<std::thread> threads;
    for (std::int32_t t = 0; t < 3; ++t) {
        threads.emplace_back([&both, t] {
            for (int step = 0; step < 100; ++step) {
                const std::int32_t row = (step + t) % (kRows - 1);
                CHECK(both.take({row, row + 1}));
                CHECK((both.guest.range.data() + kPages * kPage)[row * kBlock] == static_cast<std::byte>(row + 1));
                CHECK(both.lender.guests_of({row, row + 1}) == (std::vector<std::uint8_t>{1, 1}));
                both.drop({row + 1, row});
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(both.guest.arena->stats().guest_bytes == 0);
    both.guest.range.check();
    both.lender.arena->check();
}

}  // namespace

int main() {
    taken_blocks_show_what_the_lender_has();
    a_page_has_a_guest_until_its_last_block_is_dropped();
    what_a_guest_holds_outlives_its_owner();
    places_that_are_none_are_refused();
    threads_take_and_drop_at_once();
    return 0;
}
