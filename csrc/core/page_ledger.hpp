// Who holds each physical page of an arena, in memory that every process of the arena maps.
// The truth is one word a page (`owners`); all counters can be rebuilt from it, so a process that dies inside a call
// leaves nothing half done: what it held is free once it is seen to be dead.
// Beside its owner a page may have guests: other registrations that read what lies in it. It is free only when it has
// neither; one whose owner went first is an orphan until its last guest leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/page_source.hpp"
#include "core/process.hpp"

namespace poolweave {

inline constexpr std::uint32_t kNoPage = 0xffffffffu;

class PageLedger {
  public:
    struct Counts {
        std::uint64_t capacity;  // pages the arena can ever have
        std::uint64_t budget;    // pages it may have now
        std::uint64_t held;      // owned by a live process
        std::uint64_t kept;      // free, with memory behind them
        std::uint64_t processes;
        std::uint64_t guests;    // pages that others than their owner read
        std::uint64_t orphans;   // held by guests alone
    };
    // A registration as others can name it.
    struct Member {
        ProcessId process;
        std::uint32_t place = 0;  // in the list of openers
    };

    // A new ledger of `capacity` pages that may use `budget` of them; `source` is where they come from, and outlives it.
    static PageLedger create(PageSource& source, std::size_t page_bytes, std::uint64_t capacity, std::uint64_t budget);
    // The ledger that another process made of `data_bytes`; takes over `ledger_fd`, also when it throws kConfig because it
    // is none of ours.
    static PageLedger attach(PageSource& source, std::uint64_t data_bytes, int ledger_fd);

    PageLedger(const PageLedger&) = delete;
    PageLedger& operator=(const PageLedger&) = delete;
    PageLedger(PageLedger&& other) noexcept;
    PageLedger& operator=(PageLedger&&) = delete;
    ~PageLedger();  // gives back what this registration still holds

    // Take one page an entry of `pages`, all or none. `first` is the page wished for pages[0] (kNoPage: any); each further
    // page is the neighbour of the one before when that is free, else a kept one, else the lowest.
    // Throws kOutOfPages.
    void take(std::span<std::uint32_t> pages, std::uint32_t first);
    // Pages held by this registration become free; their memory is kept unless the budget is exceeded.
    void give(std::span<const std::uint32_t> pages);
    // Grow at once, or shrink: kept pages are released until the rest fits; held ones stay until given.
    void set_budget(std::uint64_t pages);
    // Release every kept page. Returns how many.
    std::uint64_t trim();
    // Free the pages of processes that died. Returns how many.
    std::uint64_t reap();

    // Be a guest on pages that `lender` vouches for: all, or, returning false, none because it is gone and may have lost them.
    bool hold(std::span<const std::uint32_t> pages, const Member& lender);
    void unhold(std::span<const std::uint32_t> pages) noexcept;
    // Whether a page of each group has a guest; kNoPage has none. Group i ends before pages[ends[i]].
    void have_guests(std::span<const std::uint32_t> pages, std::span<const std::size_t> ends, std::span<std::uint8_t> out);
    // How often guests have left: while it stands, have_guests() says of nothing that it lost its last one.
    std::uint64_t departures();
    Member self() const;

    // Count a range of this registration. Throws kConfig when another range, of any process, is sole or this one would be.
    void add_range(bool sole);
    void drop_range() noexcept;

    Counts counts();
    void check();  // throws std::logic_error when a counter differs from the owners
    int fd() const noexcept { return ledger_fd_; }
    std::size_t page_bytes() const noexcept;
    std::uint64_t capacity() const noexcept;
    std::uint64_t id() const noexcept;  // drawn at creation: names the arena to its members

  private:
    struct Header;
    class Guard;

    PageLedger(PageSource& source, int ledger_fd, Header* header, std::size_t nbytes);
    static Header* map(int ledger_fd, std::size_t nbytes);
    void enroll();
    void rebuild();
    std::uint64_t reap_locked();
    void release_owner(std::uint32_t owner);
    bool has_guest(std::uint64_t page) const noexcept;
    bool any_guest(std::uint64_t page) const noexcept;
    void remove_guest(std::uint64_t page, std::uint32_t place) noexcept;
    void remove_guest_everywhere(std::uint32_t place) noexcept;
    std::uint32_t find_free();
    void own(std::uint32_t page);
    void release_excess(std::uint64_t allowed);

    PageSource* source_;
    int ledger_fd_;
    Header* header_;
    std::uint32_t* owners_;
    std::uint64_t* guests_;  // a set of places a page
    std::size_t nbytes_;
    std::uint32_t self_ = 0;  // what `owners` holds for our pages
};

}  // namespace poolweave
