// A flag that ends a copy or a wait from another thread: read by copies, polled (as an eventfd) by socket waits.
#pragma once

#include <atomic>

namespace poolweave {

class Abort {
  public:
    Abort();
    ~Abort();
    Abort(const Abort&) = delete;
    Abort& operator=(const Abort&) = delete;

    void set() noexcept;  // idempotent, from any thread
    bool is_set() const noexcept { return flag_.load(std::memory_order_acquire); }
    int fd() const noexcept { return fd_; }  // readable once set

  private:
    std::atomic<bool> flag_{false};
    int fd_;
};

}  // namespace poolweave
