#include "core/range.hpp"


#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace poolweave {
namespace {

constexpr std::uint64_t kMapsLeftForOthers = 1024;

// Throws when `needed` kernel mappings more could exceed vm.max_map_count. Says nothing where /proc is not readable.
void require_mappings(std::uint64_t needed, std::uint64_t page_bytes) {
    std::uint64_t limit = 0;
    std::ifstream limit_file("/proc/sys/vm/max_map_count");
    if (!(limit_file >> limit)) return;
    std::ifstream maps("/proc/self/maps");
    const auto used = static_cast<std::uint64_t>(
        std::count(std::istreambuf_iterator<char>(maps), std::istreambuf_iterator<char>(), '\n'));
    if (used + needed + kMapsLeftForOthers <= limit) return;
    throw Error(Code::kConfig, "a range of " + std::to_string(needed) + " pages of " + std::to_string(page_bytes) +
                                   " bytes may need as many kernel mappings, and " + std::to_string(used) + " of vm.max_map_count=" +
                                   std::to_string(limit) + " are in use; raise page_bytes or `sysctl vm.max_map_count`");
}

}  // namespace

Range::Range(std::shared_ptr<Arena> arena, std::uint64_t nbytes, bool sole, std::uint64_t guest_bytes)
    : arena_(std::move(arena)), sole_(sole) {
    const std::uint64_t page = arena_->page_bytes();
    const std::uint64_t pages = arena_->to_pages(nbytes);
    const std::uint64_t capacity = arena_->ledger().capacity();
    if (pages == 0 || (sole && pages > capacity)) {
        throw Error(Code::kConfig, "a range of " + std::to_string(pages) + " pages does not fit an arena of " +
                                       std::to_string(capacity) + "; give it 1 page or more, and raise the arena's capacity");
    }
    if (!sole) require_mappings(std::min(pages, 2 * capacity + 1), page);
    const std::uint64_t guest_pages = arena_->to_pages(guest_bytes);
    if (guest_pages > 0) {
        share_table(pages + guest_pages);
    } else {
        private_table_.assign(pages, kNoPage);
        table_ = private_table_;
    }
    guest_table_ = table_.subspan(pages);
    table_ = table_.first(pages);
    pinned_.assign(pages, false);
    arena_->ledger().add_range(sole);
    nbytes_ = (pages + guest_pages) * page;
    try {
        base_ = arena_->source().reserve(nbytes_, page);
    } catch (const Error&) {
        arena_->ledger().drop_range();
        unshare_table();
        throw;
    }
}

Range::~Range() {
    unpin(0, num_pages());
    arena_->source().unreserve(base_, nbytes_);
    guest_arena_.reset();  // its registration ends, and all that it held as a guest
    std::vector<std::uint32_t> pages;
    std::copy_if(table_.begin(), table_.end(), std::back_inserter(pages), [](std::uint32_t p) { return p != kNoPage; });
    try {
        arena_->ledger().give(pages);
    } catch (const Error&) {  // the ledger's mutex is unusable: the pages go with the process
    }
    arena_->ledger().drop_range();
    unshare_table();
}

void Range::map(std::uint64_t first, std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    require(first, count, false);
    map_locked(first, count);
}

void Range::unmap(std::uint64_t first, std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    require(first, count, true);
    unmap_locked(first, count);
}

void Range::ensure(std::uint64_t first, std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> done;
    try {
        each_run(first, count, false, [&](std::uint64_t at, std::uint64_t n) {
            map_locked(at, n);
            done.emplace_back(at, n);
        });
    } catch (const Error&) {
        for (const auto& [at, n] : done) unmap_locked(at, n);
        throw;
    }
}

void Range::drop(std::uint64_t first, std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    each_run(first, count, true, [&](std::uint64_t at, std::uint64_t n) { unmap_locked(at, n); });
}

// Calls apply(first, count) for each run of pages that are mapped, or are not.
template <typename Apply>
void Range::each_run(std::uint64_t first, std::uint64_t count, bool mapped, Apply apply) {
    require_inside(first, count);
    const std::uint64_t end = first + count;
    for (std::uint64_t at = first; at < end;) {
        std::uint64_t next = at;
        while (next < end && (table_[next] != kNoPage) == mapped) ++next;
        if (next > at) apply(at, next - at);
        at = next + (next == at);
    }
}

void Range::map_locked(std::uint64_t first, std::uint64_t count) {
    if (count == 0) return;
    const std::uint32_t before = first > 0 ? table_[first - 1] : kNoPage;
    const bool follow = !sole_ && before != kNoPage;  // join the mapping below
    std::vector<std::uint32_t> pages(count);
    arena_->ledger().take(pages, follow ? before + 1 : static_cast<std::uint32_t>(first));
    try {
        map_runs(first, pages);
        pin(first, count);
    } catch (const Error&) {
        unmap_pages(first, count);
        arena_->ledger().give(pages);
        throw;
    }
    std::copy(pages.begin(), pages.end(), table_.begin() + static_cast<std::ptrdiff_t>(first));
    num_mapped_ += count;
}

void Range::unmap_locked(std::uint64_t first, std::uint64_t count) {
    if (count == 0) return;
    unpin(first, count);
    if (!unmap_pages(first, count)) {
        const int number = errno;
        throw Error(Code::kOs, std::string("cannot unmap pages: ") + std::strerror(number), {number});
    }
    const auto begin = table_.begin() + static_cast<std::ptrdiff_t>(first);
    const std::vector<std::uint32_t> pages(begin, begin + static_cast<std::ptrdiff_t>(count));
    std::fill_n(begin, count, kNoPage);
    num_mapped_ -= count;
    arena_->ledger().give(pages);
}

std::uint64_t Range::num_mapped() const {
    const std::lock_guard lock(mutex_);
    return num_mapped_;
}

std::uint64_t Range::num_mapped_from(std::uint64_t first) const {
    const std::lock_guard lock(mutex_);
    const auto begin = table_.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(first, table_.size()));
    return static_cast<std::uint64_t>(std::count_if(begin, table_.end(), [](std::uint32_t page) { return page != kNoPage; }));
}

std::uint32_t Range::page_at(std::uint64_t index) const {
    const std::lock_guard lock(mutex_);
    return index < table_.size() ? table_[index] : kNoPage;
}

void Range::check() const {
    const std::lock_guard lock(mutex_);
    std::uint64_t mapped = 0;
    for (std::uint64_t index = 0; index < table_.size(); ++index) {
        mapped += table_[index] != kNoPage;
        if (sole_ && table_[index] != kNoPage && table_[index] != index) throw std::logic_error("a sole range is not in place");
    }
    check_guests();
    if (mapped != num_mapped_) throw std::logic_error("a range counts its pages wrong");
}

void Range::require_inside(std::uint64_t first, std::uint64_t count) const {
    if (first > table_.size() || count > table_.size() - first) {
        throw Error(Code::kConfig, "pages " + std::to_string(first) + " to " + std::to_string(first + count) +
                                       " lie outside a range of " + std::to_string(table_.size()));
    }
}

void Range::require(std::uint64_t first, std::uint64_t count, bool mapped) const {
    require_inside(first, count);
    for (std::uint64_t index = first; index < first + count; ++index) {
        if ((table_[index] != kNoPage) != mapped) {
            throw Error(Code::kConfig, "page " + std::to_string(index) + (mapped ? " is not mapped" : " is mapped already"));
        }
    }
}

// One mapping a run of neighbouring arena pages. Throws kConfig, kOs.
void Range::map_runs(std::uint64_t first, const std::vector<std::uint32_t>& pages) {
    const std::uint64_t page = arena_->page_bytes();
    for (std::size_t begin = 0; begin < pages.size();) {
        std::size_t end = begin + 1;
        while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
        arena_->source().map(base_ + (first + begin) * page, std::uint64_t{pages[begin]} * page, (end - begin) * page);
        begin = end;
    }
}

// Lock what was just mapped, as the arena wants it. Throws kConfig when it must be and cannot.
void Range::pin(std::uint64_t first, std::uint64_t count) {
    if (arena_->pinned() == Want::kOff) return;
    const std::uint64_t nbytes = count * arena_->page_bytes();
    const Pinner::Result result = arena_->pinner().pin(base_ + first * arena_->page_bytes(), nbytes);
    if (result.why.empty()) {
        std::fill_n(pinned_.begin() + static_cast<std::ptrdiff_t>(first), count, true);
        arena_->count_pinned(static_cast<std::int64_t>(nbytes));
        return;
    }
    if (arena_->pinned() == Want::kPrefer) return;
    throw Error(Code::kConfig, "pinned='require' needs to lock " + std::to_string(nbytes) + " bytes (" + result.why + "), " +
                                   result.advice + ", or set pinned='prefer'",
                {static_cast<std::int64_t>(nbytes), result.limit});
}

// Of pages that are about to be unmapped.
void Range::unpin(std::uint64_t first, std::uint64_t count) noexcept {
    std::int64_t pages = 0;
    for (std::uint64_t index = first; index < first + count; ++index) {
        if (!pinned_[index]) continue;
        arena_->pinner().unpin(base_ + index * arena_->page_bytes());
        pinned_[index] = false;
        ++pages;
    }
    arena_->count_pinned(-pages * static_cast<std::int64_t>(arena_->page_bytes()));
}

bool Range::unmap_pages(std::uint64_t first, std::uint64_t count) noexcept {
    const std::uint64_t page = arena_->page_bytes();
    return arena_->source().unmap(base_ + first * page, count * page);
}

}  // namespace poolweave
