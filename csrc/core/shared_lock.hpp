// A lock for structures that are read far more than written: readers do not disturb one another, writers do not starve.
//
// A reader counts itself in one of a few cache lines, picked by its thread, so parallel readers share no line. A
// writer raises a flag, which keeps new readers out, and waits until every line counts zero.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace poolweave {

class SharedLock {
  public:
    void lock() {
        writers_.lock();
        writing_.store(true, std::memory_order_seq_cst);
        for (std::size_t i = 0; i < kLines; ++i) wait_for_readers(i);
    }

    // True when neither a reader nor a writer holds it now: a hint, it may change at once.
    bool idle() const noexcept {
        if (writing_.load(std::memory_order_relaxed)) return false;
        for (const Line& line : readers_) {
            if (line.count.load(std::memory_order_relaxed) != 0) return false;
        }
        return true;
    }

    void unlock() {
        writing_.store(false, std::memory_order_seq_cst);
        writing_.notify_all();
        writers_.unlock();
    }

    void lock_shared() {
        while (!try_lock_shared()) writing_.wait(true, std::memory_order_acquire);
    }

    bool try_lock_shared() {
        std::atomic<std::uint32_t>& count = readers_[line()].count;
        count.fetch_add(1, std::memory_order_seq_cst);
        if (!writing_.load(std::memory_order_seq_cst)) return true;
        count.fetch_sub(1, std::memory_order_release);
        return false;
    }

    void unlock_shared() { readers_[line()].count.fetch_sub(1, std::memory_order_release); }

    // The line of the calling thread: threads take them in turn, so that few threads never share one.
    static constexpr std::size_t kLines = 16;
    static std::size_t line() noexcept {
        static std::atomic<std::size_t> next{0};
        static thread_local const std::size_t mine = next.fetch_add(1, std::memory_order_relaxed) % kLines;
        return mine;
    }

  private:
    struct alignas(64) Line {
        std::atomic<std::uint32_t> count{0};
    };

    // Readers hold the lock for microseconds: yield first, and sleep only when one was descheduled while holding it.
    void wait_for_readers(std::size_t index) const {
        for (int spins = 0; readers_[index].count.load(std::memory_order_seq_cst) != 0; ++spins) {
            if (spins < 64) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        }
    }

    std::mutex writers_;
    std::atomic<bool> writing_{false};
    std::array<Line, kLines> readers_{};
};

}  // namespace poolweave
