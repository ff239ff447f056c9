// Who holds each physical page of an arena, in memory that every process of the arena maps.
// The truth is one word a page (`owners`); all counters can be rebuilt from it, so a process that dies inside a call
// leaves nothing half done: what it held is free once it is seen to be dead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

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
    };

    // A new ledger of `capacity` pages that may use `budget` of them; `data_fd` is the file the pages lie in.
    static PageLedger create(int data_fd, std::size_t page_bytes, std::uint64_t capacity, std::uint64_t budget);
    // The ledger that another process made; takes over `ledger_fd`, also when it throws kConfig because it is none of ours.
    static PageLedger attach(int data_fd, int ledger_fd);

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
    // Grow at once, or shrink: kept pages are punched until the rest fits; held ones stay until given.
    void set_budget(std::uint64_t pages);
    // Punch every kept page. Returns how many.
    std::uint64_t trim();
    // Free the pages of processes that died. Returns how many.
    std::uint64_t reap();

    // Count a range of this registration. Throws kConfig when another range, of any process, is sole or this one would be.
    void add_range(bool sole);
    void drop_range() noexcept;

    Counts counts();
    void check();  // throws std::logic_error when a counter differs from the owners
    int fd() const noexcept { return ledger_fd_; }
    std::size_t page_bytes() const noexcept;
    std::uint64_t capacity() const noexcept;

  private:
    struct Header;
    class Guard;

    PageLedger(int data_fd, int ledger_fd, Header* header, std::size_t nbytes);
    static Header* map(int ledger_fd, std::size_t nbytes);
    void enroll();
    void rebuild();
    std::uint64_t reap_locked();
    std::uint64_t release_owner(std::uint32_t owner);
    std::uint32_t find_free();
    void own(std::uint32_t page);
    void punch_excess(std::uint64_t allowed);

    int data_fd_;
    int ledger_fd_;
    Header* header_;
    std::uint32_t* owners_;
    std::size_t nbytes_;
    std::uint32_t self_ = 0;  // what `owners` holds for our pages
};

}  // namespace poolweave
