// Arena, ranges and the page ledger: budget, reuse, holes, zeros where nothing is mapped, several openers.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/range.hpp"

using poolweave::Arena;
using poolweave::Code;
using poolweave::kNoPage;
using poolweave::Range;

namespace {

constexpr std::uint64_t kPage = 64 << 10;

std::shared_ptr<Arena> arena(std::uint64_t capacity, std::uint64_t budget) {
    return Arena::create(capacity * kPage, budget * kPage, kPage);
}

void unmapped_pages_read_as_zeros() {
    Range range(arena(8, 8), 8 * kPage, true);
    CHECK(range.data()[0] == std::byte{0} && range.data()[8 * kPage - 1] == std::byte{0});
    range.map(0, 2);
    std::memset(range.data(), 7, 2 * kPage);
    CHECK(range.data()[2 * kPage] == std::byte{0});
    range.unmap(1, 1);
    CHECK(range.data()[kPage - 1] == std::byte{7} && range.data()[kPage] == std::byte{0});
    CHECK(reinterpret_cast<std::uintptr_t>(range.data()) % kPage == 0);
}

void a_sole_range_lies_in_place() {
    const auto a = arena(16, 16);
    Range range(a, 16 * kPage, true);
    range.map(8, 4);
    range.map(0, 2);
    for (const std::uint64_t page : {0, 1, 8, 9, 10, 11}) CHECK(range.page_at(page) == page);
    CHECK(range.page_at(2) == kNoPage && range.page_at(99) == kNoPage);
    CHECK_THROWS(Range(a, kPage, false), Code::kConfig);
    CHECK_THROWS(Range(a, kPage, true), Code::kConfig);
    range.check();
    a->check();
}

void the_budget_bounds_what_is_held() {
    const auto a = arena(16, 4);
    Range range(a, 16 * kPage, true);
    range.map(0, 3);
    CHECK_THROWS(range.map(3, 2), Code::kOutOfPages);
    CHECK(range.num_mapped() == 3 && a->stats().held_bytes == 3 * kPage);
    a->set_budget(5 * kPage);
    range.map(3, 2);
    CHECK_THROWS(a->set_budget(17 * kPage), Code::kConfig);
    a->set_budget(2 * kPage);  // shrinking takes nothing that is held
    CHECK(a->stats().held_bytes == 5 * kPage);
    CHECK_THROWS(range.map(5, 1), Code::kOutOfPages);
    range.unmap(1, 4);
    CHECK(a->stats().held_bytes + a->stats().kept_bytes <= 2 * kPage);
    a->check();
}

void freed_pages_are_kept_and_punched_only_to_shrink() {
    const auto a = arena(16, 8);
    Range range(a, 16 * kPage, true);
    range.map(0, 8);
    std::memset(range.data(), 1, 8 * kPage);
    CHECK(a->stats().resident_bytes == 8 * kPage);
    range.unmap(4, 4);
    CHECK(a->stats().resident_bytes == 8 * kPage && a->stats().kept_bytes == 4 * kPage);
    range.map(8, 4);  // within the budget only when kept pages go
    std::memset(range.data() + 8 * kPage, 1, 4 * kPage);
    CHECK(a->stats().resident_bytes == 8 * kPage && a->stats().kept_bytes == 0);
    range.unmap(8, 4);
    CHECK(a->trim() == 4 * kPage && a->stats().resident_bytes == 4 * kPage);
    range.map(4, 1);
    CHECK(range.data()[4 * kPage] == std::byte{0});
    a->check();
}

void mapping_is_all_or_nothing() {
    const auto a = arena(8, 8);
    Range range(a, 8 * kPage, true);
    range.map(3, 1);
    CHECK_THROWS(range.map(2, 2), Code::kConfig);
    CHECK_THROWS(range.map(7, 2), Code::kConfig);
    CHECK_THROWS(range.map(~std::uint64_t{0}, 2), Code::kConfig);
    CHECK_THROWS(range.unmap(3, 2), Code::kConfig);
    CHECK(range.num_mapped() == 1);
    range.ensure(0, 8);
    CHECK(range.num_mapped() == 8);
    range.drop(2, 3);
    range.drop(0, 8);
    CHECK(range.num_mapped() == 0 && a->stats().held_bytes == 0);
    a->set_budget(2 * kPage);
    range.map(1, 1);
    CHECK_THROWS(range.ensure(0, 8), Code::kOutOfPages);
    CHECK(range.num_mapped() == 1 && range.page_at(1) == 1);
    range.check();
    a->check();
}

void ranges_share_a_budget_and_pages() {
    const auto a = arena(8, 8);
    auto first = std::make_unique<Range>(a, 64 * kPage, false);
    Range second(a, 64 * kPage, false);
    first->map(0, 5);
    second.map(60, 3);
    CHECK_THROWS(second.map(0, 1), Code::kOutOfPages);
    std::set<std::uint32_t> pages;
    for (std::uint64_t i = 0; i < 64; ++i) {
        if (first->page_at(i) != kNoPage) pages.insert(first->page_at(i));
        if (second.page_at(i) != kNoPage) pages.insert(second.page_at(i));
    }
    CHECK(pages.size() == 8);
    first.reset();
    second.map(0, 5);
    CHECK_THROWS(Range(a, kPage, true), Code::kConfig);
    a->check();
}

void too_many_mappings_are_refused_at_the_start() {
    const auto a = Arena::create(std::uint64_t{4} << 30, std::uint64_t{1} << 30, 4096);
    CHECK_THROWS(Range(a, std::uint64_t{4} << 30, false), Code::kConfig);
    const Range sole(a, std::uint64_t{4} << 30, true);  // runs: no such need
    CHECK(sole.num_pages() == 1 << 20);
}

void wrong_sizes_are_refused() {
    CHECK_THROWS(Arena::create(kPage, kPage, 1000), Code::kConfig);
    CHECK_THROWS(Arena::create(kPage, kPage, 1024), Code::kConfig);
    CHECK_THROWS(Arena::create(0, 0, kPage), Code::kConfig);
    CHECK_THROWS(Arena::create(kPage, 2 * kPage, kPage), Code::kConfig);
    CHECK_THROWS(Range(arena(2, 2), 3 * kPage, true), Code::kConfig);
    CHECK_THROWS(Range(arena(2, 2), 0, true), Code::kConfig);
}

void the_readonly_descriptor_reads_and_never_writes() {
    const auto a = arena(4, 4);
    Range range(a, 4 * kPage, true);
    range.map(0, 4);
    std::memset(range.data() + kPage, 9, kPage);
    const int fd = a->readonly_fd();
    CHECK(fd == a->readonly_fd());
    void* const peer = mmap(nullptr, 4 * kPage, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(peer != MAP_FAILED);
    CHECK(static_cast<std::byte*>(peer)[kPage] == std::byte{9});
    CHECK(mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    CHECK(ftruncate(a->data_fd(), 0) != 0);  // sealed: no reader meets the end of the file
    munmap(peer, 4 * kPage);
}

void a_second_opener_draws_on_the_same_budget() {
    const auto a = arena(8, 8);
    const auto b = Arena::attach(a->data_fd(), a->ledger_fd());
    CHECK(a->stats().processes == 1);
    Range mine(a, 8 * kPage, false);
    {
        Range theirs(b, 8 * kPage, false);
        theirs.map(0, 6);
        std::memset(theirs.data(), 5, 6 * kPage);
        CHECK_THROWS(mine.map(0, 3), Code::kOutOfPages);
    }
    mine.map(0, 8);
    CHECK(mine.data()[0] == std::byte{5});  // kept pages come as they were
    a->check();
    b->check();
    const int other = open("/dev/null", O_RDONLY);
    CHECK_THROWS(Arena::attach(a->data_fd(), other), Code::kConfig);
    CHECK_THROWS(Arena::attach(a->data_fd(), a->data_fd()), Code::kConfig);
    close(other);
}

void random_runs_keep_all_invariants() {
    std::mt19937 random(7);
    const auto a = arena(32, 24);
    std::vector<std::unique_ptr<Range>> ranges;
    for (int i = 0; i < 3; ++i) ranges.push_back(std::make_unique<Range>(a, 32 * kPage, false));
    for (int step = 0; step < 3000; ++step) {
        Range& range = *ranges[random() % 3];
        const std::uint64_t first = random() % 32;
        const std::uint64_t count = random() % (33 - first);
        const std::uint64_t before = a->stats().held_bytes;
        try {
            switch (random() % 4) {
                case 0: range.map(first, count); break;
                case 1: range.unmap(first, count); break;
                case 2: range.ensure(first, count); break;
                default: range.drop(first, count); break;
            }
        } catch (const poolweave::Error&) {
            CHECK(a->stats().held_bytes == before);
        }
        if (step % 100 == 0) a->set_budget((8 + random() % 25) * kPage);
        a->check();
        for (const auto& r : ranges) r->check();
    }
}

void threads_map_and_unmap_at_once() {
    const auto a = arena(64, 40);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&a, t] {
            Range range(a, 64 * kPage, false);
            std::mt19937 random(t);
            for (int step = 0; step < 300; ++step) {
                const std::uint64_t first = random() % 50;
                try {
                    range.map(first, 14);
                    std::memset(range.data() + first * kPage, static_cast<int>(t + 1), kPage);
                    CHECK(range.data()[first * kPage + kPage - 1] == static_cast<std::byte>(t + 1));
                    range.unmap(first, 14);
                } catch (const poolweave::Error& error) {
                    CHECK(error.code() == Code::kOutOfPages);
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(a->stats().held_bytes == 0);
    a->check();
}

}  // namespace

int main() {
    unmapped_pages_read_as_zeros();
    a_sole_range_lies_in_place();
    the_budget_bounds_what_is_held();
    freed_pages_are_kept_and_punched_only_to_shrink();
    mapping_is_all_or_nothing();
    ranges_share_a_budget_and_pages();
    too_many_mappings_are_refused_at_the_start();
    wrong_sizes_are_refused();
    the_readonly_descriptor_reads_and_never_writes();
    a_second_opener_draws_on_the_same_budget();
    random_runs_keep_all_invariants();
    threads_map_and_unmap_at_once();
    return 0;
}
