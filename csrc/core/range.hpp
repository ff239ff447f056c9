// A span of reserved address space into which an arena's pages are mapped on demand.
// Of host memory, what is not mapped reads as zeros (writing there faults); the span never moves, so growth keeps every view valid.
//
//   address   base                                          base + nbytes
//             [ mapped pages, read and write ][ zeros, read-only        )
//
// Behind its own pages a range may have room for guests: pages of other ranges of the arena, mapped read-only as long as
// blocks in them are taken. Which arena page lies behind each of its pages is then written to a file that the owners of
// other ranges map: they find there what they may take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/arena.hpp"

namespace poolweave {

class Range {
  public:
    // Reserve `nbytes` (rounded up to whole pages); costs no memory. `sole`: the arena has no other range, so page p of the
    // range is page p of the file and runs of pages are single kernel mappings. A range that is not sole may need a kernel
    // mapping a page: throws kConfig when vm.max_map_count could not hold them. `guest_bytes` more may hold guests.
    Range(std::shared_ptr<Arena> arena, std::uint64_t nbytes, bool sole, std::uint64_t guest_bytes = 0);
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
    ~Range();  // pages go back to the arena

    // Back pages [first, first + count) with memory of the arena; all or none. Throws kOutOfPages, and kConfig for pages
    // outside the range, mapped already, or that must be pinned and cannot be.
    void map(std::uint64_t first, std::uint64_t count);
    // Give pages [first, first + count) back; they read as zeros from then on. Throws kConfig when one is not mapped.
    void unmap(std::uint64_t first, std::uint64_t count);

    // The same for those of the pages that are not mapped yet, or still are.
    void ensure(std::uint64_t first, std::uint64_t count);
    void drop(std::uint64_t first, std::uint64_t count);

    // Take blocks of another range: block i is to lie at byte rows[i] * block_bytes of this one, all of it behind the own
    // pages, where page p is page p - shift of `lender`'s range, as its `table` says. All, or, returning false, none: the
    // lender is gone, or its page is not what it was. Cost: a system call for each run of pages that are new here.
    bool take_guests(const PageLedger::Member& lender, std::span<const std::int32_t> rows, std::uint64_t block_bytes,
                     std::int64_t shift, std::span<const std::uint32_t> table);
    // Blocks taken before are done with, each once.
    void drop_guests(std::span<const std::int32_t> rows, std::uint64_t block_bytes);
    // Whether others are guests on pages of each of these blocks. False behind the own pages.
    void have_guests(std::span<const std::int32_t> rows, std::uint64_t block_bytes, std::span<std::uint8_t> out);
    // The table in a file, read-only, for others; owned by the range. -1 where there is no room for guests.
    int table_fd() const noexcept { return table_fd_; }

    std::byte* data() const noexcept { return base_; }
    std::uint64_t nbytes() const noexcept { return nbytes_; }  // room for guests included
    std::uint64_t num_pages() const noexcept { return table_.size(); }  // own ones
    std::uint64_t num_mapped() const;
    std::uint64_t num_mapped_from(std::uint64_t first) const;
    // The arena page behind page `index` of the range; kNoPage when there is none.
    std::uint32_t page_at(std::uint64_t index) const;
    bool sole() const noexcept { return sole_; }
    const std::shared_ptr<Arena>& arena() const noexcept { return arena_; }
    void check() const;

  private:
    void require_inside(std::uint64_t first, std::uint64_t count) const;
    void require(std::uint64_t first, std::uint64_t count, bool mapped) const;
    void map_locked(std::uint64_t first, std::uint64_t count);
    void unmap_locked(std::uint64_t first, std::uint64_t count);
    template <typename Apply>
    void each_run(std::uint64_t first, std::uint64_t count, bool mapped, Apply apply);
    void map_runs(std::uint64_t first, const std::vector<std::uint32_t>& pages);
    void pin(std::uint64_t first, std::uint64_t count);
    void unpin(std::uint64_t first, std::uint64_t count) noexcept;
    bool unmap_pages(std::uint64_t first, std::uint64_t count) noexcept;
    void share_table(std::uint64_t pages);
    void unshare_table() noexcept;
    void check_guests() const;
    void unmap_guests(std::span<const std::uint64_t> indices) noexcept;
    void let_go(std::span<const std::uint32_t> pages);
    template <typename Each>
    void each_page(std::span<const std::int32_t> rows, std::uint64_t block_bytes, Each each) const;

    std::shared_ptr<Arena> arena_;
    bool sole_;
    std::byte* base_ = nullptr;
    std::uint64_t nbytes_ = 0;
    mutable std::mutex mutex_;  // guards the table
    std::vector<std::uint32_t> private_table_;  // what table_ shows where nobody else reads it
    std::span<std::uint32_t> table_;            // of the own pages
    std::span<std::uint32_t> guest_table_;      // of those behind them
    std::vector<std::uint32_t> guest_refs_;     // blocks taken, by page behind the own ones; empty until the first
    // How many pages of ours show a page of the arena, by that: it may have come by several ways, from its owner and
    // handed on. Empty until the first.
    std::vector<std::uint32_t> guest_views_;
    std::shared_ptr<Arena> guest_arena_;        // the arena joined once more: as a guest
    int table_fd_ = -1;
    std::vector<bool> pinned_;
    std::uint64_t num_mapped_ = 0;
};

}  // namespace poolweave
