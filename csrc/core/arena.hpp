// Physical pages of one tier under a byte budget: where they come from, and the ledger that says who holds which page.
// Ranges (range.hpp) map its pages into address space. Host memory can be joined by other processes (memfd_pages.hpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/memfd_pages.hpp"
#include "core/page_ledger.hpp"
#include "core/pinner.hpp"

namespace poolweave {

// Whether a kind of memory is asked for, taken where it can be had, or insisted on.
enum class Want : std::uint8_t { kOff, kPrefer, kRequire };

struct MemoryKind {
    Want huge_pages = Want::kOff;  // of 2 MiB, from vm.nr_hugepages
    Want pinned = Want::kOff;      // never swapped
    std::unique_ptr<Pinner> pinner = nullptr;  // how that is done; null: mlock, which counts against RLIMIT_MEMLOCK
};

class Arena {
  public:
    struct Stats {
        std::uint64_t page_bytes;
        std::uint64_t capacity_bytes;  // the most the budget can be raised to
        std::uint64_t budget_bytes;
        std::uint64_t held_bytes;      // in ranges of any process
        std::uint64_t kept_bytes;      // free, their memory kept for reuse
        std::uint64_t resident_bytes;  // what the system has given
        std::uint64_t processes;
        bool huge_pages;               // obtained
        std::uint64_t pinned_bytes;    // obtained, in this process
        std::uint64_t guest_bytes;     // of the held ones: read by others than their owner too
        std::uint64_t orphan_bytes;    // of the held ones: their owner is gone, others still read them
    };

    // Sizes are rounded up to whole pages. Throws kConfig for a page size that is no power of two of at least the
    // system's, a budget above the capacity, or a required kind of memory that cannot be had.
    static std::shared_ptr<Arena> create(std::uint64_t capacity_bytes, std::uint64_t budget_bytes, std::uint64_t page_bytes,
                                         MemoryKind kind = {});
    // The same of other memory than the host's: private to this process, and neither huge nor pinned.
    static std::shared_ptr<Arena> create_of(std::unique_ptr<PageSource> source, std::uint64_t capacity_bytes,
                                            std::uint64_t budget_bytes, std::uint64_t page_bytes);
    // Join an arena of another process by its two descriptors, which are duplicated. The file decides on huge pages.
    static std::shared_ptr<Arena> attach(int data_fd, int ledger_fd, Want pinned = Want::kOff);

    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void set_budget(std::uint64_t bytes) { ledger_.set_budget(to_pages(bytes)); }
    std::uint64_t trim() { return ledger_.trim() * page_bytes(); }
    std::uint64_t reap() { return ledger_.reap() * page_bytes(); }
    Stats stats();
    void check();

    PageLedger& ledger() noexcept { return ledger_; }
    PageSource& source() noexcept { return *source_; }
    bool is_host() const noexcept { return file_ != nullptr; }
    // What attach() takes, and the file opened read-only. Throws kConfig for memory that has no file.
    int data_fd() const { return file().fd(); }
    int ledger_fd() const { return file(), ledger_.fd(); }
    int readonly_fd() const { return file().readonly_fd(); }
    Want pinned() const noexcept { return pinned_; }
    Pinner& pinner() noexcept { return *pinner_; }
    void count_pinned(std::int64_t nbytes) noexcept { pinned_bytes_ += nbytes; }
    std::uint64_t page_bytes() const noexcept { return ledger_.page_bytes(); }
    std::uint64_t to_pages(std::uint64_t bytes) const noexcept { return (bytes + page_bytes() - 1) / page_bytes(); }

  private:
    Arena(std::unique_ptr<PageSource> source, PageLedger&& ledger, Want pinned, MemfdPages* file,
          std::unique_ptr<Pinner> pinner = nullptr)
        : source_(std::move(source)), ledger_(std::move(ledger)), pinned_(pinned), file_(file),
          pinner_(pinner ? std::move(pinner) : std::make_unique<MemoryLock>()) {}
    MemfdPages& file() const;

    std::unique_ptr<PageSource> source_;
    PageLedger ledger_;
    Want pinned_;
    MemfdPages* file_;  // the source, where it is one
    std::unique_ptr<Pinner> pinner_;
    std::atomic<std::int64_t> pinned_bytes_ = 0;
};

}  // namespace poolweave
