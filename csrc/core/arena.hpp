// Physical pages of one tier under a byte budget: an anonymous memfd and the ledger that says who holds which page.
// Ranges (range.hpp) map its pages into address space. Nothing is named in /dev/shm; the memory goes with the last
// process that has it open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/page_ledger.hpp"

namespace poolweave {

class Arena {
  public:
    struct Stats {
        std::uint64_t page_bytes;
        std::uint64_t capacity_bytes;  // the most the budget can be raised to
        std::uint64_t budget_bytes;
        std::uint64_t held_bytes;      // in ranges of any process
        std::uint64_t kept_bytes;      // free, their memory kept for reuse
        std::uint64_t resident_bytes;  // what the system has given the file
        std::uint64_t processes;
    };

    // Sizes are rounded up to whole pages. Throws kConfig for a page size that is no power of two of at least the
    // system's, or a budget above the capacity.
    static std::shared_ptr<Arena> create(std::uint64_t capacity_bytes, std::uint64_t budget_bytes, std::uint64_t page_bytes);
    // Join an arena of another process by its two descriptors, which are duplicated.
    static std::shared_ptr<Arena> attach(int data_fd, int ledger_fd);

    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena();

    void set_budget(std::uint64_t bytes) { ledger_.set_budget(to_pages(bytes)); }
    std::uint64_t trim() { return ledger_.trim() * page_bytes(); }
    std::uint64_t reap() { return ledger_.reap() * page_bytes(); }
    Stats stats();
    void check();

    PageLedger& ledger() noexcept { return ledger_; }
    int data_fd() const noexcept { return data_fd_; }
    int ledger_fd() const noexcept { return ledger_.fd(); }
    // The same file opened read-only, for peers; owned by the arena.
    int readonly_fd();
    std::uint64_t page_bytes() const noexcept { return ledger_.page_bytes(); }
    std::uint64_t to_pages(std::uint64_t bytes) const noexcept { return (bytes + page_bytes() - 1) / page_bytes(); }

  private:
    Arena(int data_fd, PageLedger&& ledger) : data_fd_(data_fd), ledger_(std::move(ledger)) {}

    int data_fd_;
    PageLedger ledger_;
    std::mutex mutex_;  // guards readonly_fd_
    int readonly_fd_ = -1;
};

}  // namespace poolweave
