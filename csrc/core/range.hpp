// A span of reserved address space into which an arena's pages are mapped on demand.
// What is not mapped reads as zeros (writing there faults); the span never moves, so growth keeps every view valid.
//
//   address   base                                          base + nbytes
//             [ mapped pages, read and write ][ zeros, read-only        )
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/arena.hpp"

namespace poolweave {

class Range {
  public:
    // Reserve `nbytes` (rounded up to whole pages); costs no memory. `sole`: the arena has no other range, so page p of the
    // range is page p of the file and runs of pages are single kernel mappings. A range that is not sole may need a kernel
    // mapping a page: throws kConfig when vm.max_map_count could not hold them.
    Range(std::shared_ptr<Arena> arena, std::uint64_t nbytes, bool sole);
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

    std::byte* data() const noexcept { return base_; }
    std::uint64_t nbytes() const noexcept { return nbytes_; }
    std::uint64_t num_pages() const noexcept { return table_.size(); }
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
    bool map_runs(std::uint64_t first, const std::vector<std::uint32_t>& pages);
    void pin(std::uint64_t first, std::uint64_t count);
    void forget_pins(std::uint64_t first, std::uint64_t count) noexcept;
    bool reserve_again(std::uint64_t first, std::uint64_t count) noexcept;

    std::shared_ptr<Arena> arena_;
    bool sole_;
    std::byte* base_ = nullptr;
    std::uint64_t nbytes_ = 0;
    void* reserved_ = nullptr;  // what mmap returned; base_ is aligned to a page of the arena
    std::uint64_t reserved_bytes_ = 0;
    mutable std::mutex mutex_;  // guards the table
    std::vector<std::uint32_t> table_;
    std::vector<bool> pinned_;
    std::uint64_t num_mapped_ = 0;
};

}  // namespace poolweave
