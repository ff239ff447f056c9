#include "core/arena.hpp"

#include <unistd.h>

#include <bit>
#include <fstream>
#include <stdexcept>
#include <string>

#include "core/error.hpp"

namespace poolweave {
namespace {

constexpr std::uint64_t kHugeBytes = 2u << 20;

std::uint64_t free_huge_pages() {
    std::uint64_t count = 0;
    std::ifstream("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") >> count;
    return count;
}

// Whether to ask for huge pages: as wanted, where there are enough for the whole budget.
bool use_huge_pages(Want want, std::uint64_t budget_bytes, std::uint64_t page_bytes) {
    if (want == Want::kOff) return false;
    const std::uint64_t needed = (budget_bytes + kHugeBytes - 1) / kHugeBytes;
    const std::uint64_t free = free_huge_pages();
    const bool aligned = page_bytes % kHugeBytes == 0;
    if (aligned && free >= needed) return true;
    if (want == Want::kPrefer) return false;
    throw Error(Code::kConfig,
                aligned ? "huge_pages='require' needs " + std::to_string(needed) + " huge pages of 2 MiB and " + std::to_string(free) +
                              " are free; raise `sysctl vm.nr_hugepages`, or set huge_pages='prefer'"
                        : "huge_pages='require' needs page_bytes to be a multiple of 2 MiB, got " + std::to_string(page_bytes),
                {static_cast<std::int64_t>(needed), static_cast<std::int64_t>(free)});
}

struct Pages {
    std::uint64_t capacity;
    std::uint64_t budget;
};

Pages count_pages(std::uint64_t capacity_bytes, std::uint64_t budget_bytes, std::uint64_t page_bytes) {
    const auto system_page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    if (!std::has_single_bit(page_bytes) || page_bytes < system_page) {
        throw Error(Code::kConfig, "page_bytes must be a power of two of at least " + std::to_string(system_page) +
                                       ", got " + std::to_string(page_bytes));
    }
    const std::uint64_t capacity = (capacity_bytes + page_bytes - 1) / page_bytes;
    const std::uint64_t budget = (budget_bytes + page_bytes - 1) / page_bytes;
    if (capacity == 0 || capacity >= kNoPage || budget > capacity) {
        throw Error(Code::kConfig, "an arena of " + std::to_string(capacity) + " pages cannot have a budget of " +
                                       std::to_string(budget) + "; it takes 1 to 2^32 - 2 pages and no larger budget");
    }
    return {capacity, budget};
}

}  // namespace

std::shared_ptr<Arena> Arena::create(std::uint64_t capacity_bytes, std::uint64_t budget_bytes, std::uint64_t page_bytes,
                                     MemoryKind kind) {
    const Pages pages = count_pages(capacity_bytes, budget_bytes, page_bytes);
    const bool huge = use_huge_pages(kind.huge_pages, pages.budget * page_bytes, page_bytes);
    auto source = MemfdPages::create(pages.capacity * page_bytes, huge);
    PageLedger ledger = PageLedger::create(*source, page_bytes, pages.capacity, pages.budget);
    MemfdPages* const file = source.get();
    return std::shared_ptr<Arena>(new Arena(std::move(source), std::move(ledger), kind.pinned, file, std::move(kind.pinner)));
}

std::shared_ptr<Arena> Arena::create_of(std::unique_ptr<PageSource> source, std::uint64_t capacity_bytes,
                                        std::uint64_t budget_bytes, std::uint64_t page_bytes) {
    const Pages pages = count_pages(capacity_bytes, budget_bytes, page_bytes);
    PageLedger ledger = PageLedger::create(*source, page_bytes, pages.capacity, pages.budget);
    return std::shared_ptr<Arena>(new Arena(std::move(source), std::move(ledger), Want::kOff, nullptr));
}

std::shared_ptr<Arena> Arena::attach(int data_fd, int ledger_fd, Want pinned) {
    auto source = MemfdPages::attach(data_fd);
    const std::uint64_t nbytes = source->nbytes();
    PageLedger ledger = PageLedger::attach(*source, nbytes, duplicate_fd(ledger_fd));
    MemfdPages* const file = source.get();
    return std::shared_ptr<Arena>(new Arena(std::move(source), std::move(ledger), pinned, file));
}

Arena::Stats Arena::stats() {
    const PageLedger::Counts counts = ledger_.counts();
    const std::uint64_t page = page_bytes();
    return {page, counts.capacity * page, counts.budget * page, counts.held * page, counts.kept * page,
            source_->resident_bytes(), counts.processes, source_->huge_pages(),
            static_cast<std::uint64_t>(pinned_bytes_.load()), counts.guests * page, counts.orphans * page};
}

void Arena::check() {
    ledger_.check();
    const Stats s = stats();
    if (s.resident_bytes > s.held_bytes + s.kept_bytes) throw std::logic_error("free pages without memory have memory");
}

MemfdPages& Arena::file() const {
    if (file_ == nullptr) {
        throw Error(Code::kConfig, "memory of a device is its process's own: only an arena of host memory has descriptors to pass on");
    }
    return *file_;
}

}  // namespace poolweave
