// Guests of a range: pages of other ranges of its arena, mapped read-only behind its own pages.
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/error.hpp"
#include "core/range.hpp"

namespace poolweave {
namespace {

[[noreturn]] void os_error(const char* what) {
    const int number = errno;
    throw Error(Code::kOs, std::string(what) + ": " + std::strerror(number), {number});
}

}  // namespace

// All `pages` entries in a file of their own; table_ shows them all until the constructor parts them.
void Range::share_table(std::uint64_t pages) {
    const std::size_t nbytes = pages * sizeof(std::uint32_t);
    const int writable = memfd_create("poolweave-pages", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (writable < 0) os_error("cannot create a range's table");
    void* memory = MAP_FAILED;
    if (ftruncate(writable, static_cast<off_t>(nbytes)) == 0 &&
        fcntl(writable, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
        memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, writable, 0);
    }
    if (memory != MAP_FAILED) table_fd_ = open(("/proc/self/fd/" + std::to_string(writable)).c_str(), O_RDONLY | O_CLOEXEC);
    const int number = errno;
    close(writable);
    if (table_fd_ < 0) {
        if (memory != MAP_FAILED) munmap(memory, nbytes);
        errno = number;
        os_error("cannot share a range's table");
    }
    table_ = {static_cast<std::uint32_t*>(memory), pages};
    std::fill(table_.begin(), table_.end(), kNoPage);
}

void Range::unshare_table() noexcept {
    if (table_fd_ < 0) return;
    munmap(table_.data(), (table_.size() + guest_table_.size()) * sizeof(std::uint32_t));
    close(table_fd_);
}

// Calls each(index) for every page behind the own ones that a block lies in, block by block.
template <typename Each>
void Range::each_page(std::span<const std::int32_t> rows, std::uint64_t block_bytes, Each each) const {
    const std::uint64_t page = arena_->page_bytes();
    for (const std::int32_t row : rows) {
        const std::uint64_t begin = static_cast<std::uint64_t>(row) * block_bytes;
        if (row < 0 || begin / page < table_.size() || begin + block_bytes > nbytes_) {
            throw Error(Code::kConfig, "row " + std::to_string(row) + " is no place for a guest");
        }
        for (std::uint64_t at = begin / page; at <= (begin + block_bytes - 1) / page; ++at) each(at - table_.size());
    }
}

bool Range::take_guests(const PageLedger::Member& lender, std::span<const std::int32_t> rows, std::uint64_t block_bytes,
                        std::int64_t shift, std::span<const std::uint32_t> table) {
    const std::lock_guard lock(mutex_);
    if (!guest_arena_) guest_arena_ = Arena::attach(arena_->data_fd(), arena_->ledger_fd());
    if (guest_refs_.empty()) {
        guest_views_.assign(arena_->ledger().capacity(), 0);
        guest_refs_.assign(guest_table_.size(), 0);
    }
    bool fits = true;
    std::vector<std::uint32_t> theirs;  // read once: the lender may map other pages at any time
    each_page(rows, block_bytes, [&](std::uint64_t index) {
        const std::int64_t at = static_cast<std::int64_t>(index + table_.size()) - shift;
        const bool inside = at >= 0 && static_cast<std::uint64_t>(at) < table.size();
        theirs.push_back(inside ? __atomic_load_n(&table[at], __ATOMIC_RELAXED) : kNoPage);
        fits = fits && theirs.back() < arena_->ledger().capacity();
    });
    if (!fits) return false;
    std::vector<std::uint64_t> indices;  // pages that are new here
    std::vector<std::uint32_t> pages;
    auto next = theirs.cbegin();
    each_page(rows, block_bytes, [&](std::uint64_t index) {
        const std::uint32_t page = *next++;
        if (guest_refs_[index]++ > 0) {
            fits = fits && guest_table_[index] == page;
            return;
        }
        guest_table_[index] = page;
        indices.push_back(index);
        pages.push_back(page);
    });
    const auto undo = [&] {
        each_page(rows, block_bytes, [&](std::uint64_t index) { --guest_refs_[index]; });
        for (const std::uint64_t index : indices) guest_table_[index] = kNoPage;
    };
    if (!fits || (!pages.empty() && !guest_arena_->ledger().hold(pages, lender))) {
        undo();
        return false;
    }
    for (const std::uint32_t one : pages) ++guest_views_[one];
    const std::uint64_t page = arena_->page_bytes();
    for (std::size_t begin = 0, end; begin < pages.size(); begin = end) {
        for (end = begin + 1; end < pages.size() && indices[end] == indices[end - 1] + 1 && pages[end] == pages[end - 1] + 1;) ++end;
        void* const at = base_ + (table_.size() + indices[begin]) * page;
        if (mmap(at, (end - begin) * page, PROT_READ, MAP_SHARED | MAP_FIXED, arena_->data_fd(),
                 static_cast<off_t>(std::uint64_t{pages[begin]} * page)) != MAP_FAILED) continue;
        const int number = errno;
        undo();
        unmap_guests(indices);
        let_go(pages);
        throw Error(number == ENOMEM ? Code::kConfig : Code::kOs,
                    std::string("cannot map another pool's pages (") + std::strerror(number) + "); raise `sysctl vm.max_map_count`", {number});
    }
    return true;
}

void Range::drop_guests(std::span<const std::int32_t> rows, std::uint64_t block_bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> indices;
    std::vector<std::uint32_t> pages;
    each_page(rows, block_bytes, [&](std::uint64_t index) {
        if (guest_refs_.empty() || guest_refs_[index] == 0) throw std::logic_error("a guest is dropped that was not taken");
        if (--guest_refs_[index] > 0) return;
        indices.push_back(index);
        pages.push_back(guest_table_[index]);
        guest_table_[index] = kNoPage;
    });
    if (pages.empty()) return;
    unmap_guests(indices);
    let_go(pages);
}

// A page of ours fewer shows each of these.
void Range::let_go(std::span<const std::uint32_t> pages) {
    std::vector<std::uint32_t> unseen;
    for (const std::uint32_t page : pages) {
        if (--guest_views_[page] == 0) unseen.push_back(page);
    }
    guest_arena_->ledger().unhold(unseen);
}

void Range::have_guests(std::span<const std::int32_t> rows, std::uint64_t block_bytes, std::span<std::uint8_t> out) {
    const std::uint64_t page = arena_->page_bytes();
    std::vector<std::uint32_t> pages;
    std::vector<std::size_t> ends;  // of each block's pages
    {
        const std::lock_guard lock(mutex_);
        pages.reserve(rows.size());
        ends.reserve(rows.size());
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const std::uint64_t begin = static_cast<std::uint64_t>(rows[i]) * block_bytes;
            for (std::uint64_t at = begin / page; at <= (begin + block_bytes - 1) / page && at < table_.size(); ++at) {
                pages.push_back(table_[at]);
            }
            ends.push_back(pages.size());
        }
    }
    arena_->ledger().have_guests(pages, ends, out);
}

// Runs of pages read as zeros again; one that cannot be (the kernel is out of mappings) keeps showing what was there.
void Range::unmap_guests(std::span<const std::uint64_t> indices) noexcept {
    for (std::size_t begin = 0, end; begin < indices.size(); begin = end) {
        for (end = begin + 1; end < indices.size() && indices[end] == indices[end - 1] + 1;) ++end;
        unmap_pages(table_.size() + indices[begin], end - begin);
    }
}

void Range::check_guests() const {
    std::uint64_t views = std::accumulate(guest_views_.begin(), guest_views_.end(), std::uint64_t{0});
    for (std::size_t index = 0; index < guest_table_.size(); ++index) {
        views -= guest_table_[index] != kNoPage;
        const bool taken = !guest_refs_.empty() && guest_refs_[index] > 0;
        if (taken != (guest_table_[index] != kNoPage)) throw std::logic_error("a guest's page and its blocks differ");
    }
    if (views != 0) throw std::logic_error("a range counts its guests' pages wrong");
}

}  // namespace poolweave
