// Bells: how workers in several processes wait for each other, over shared memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace poolweave::decode {

// A counter to sleep on. Ringing costs a system call only while somebody sleeps.
struct alignas(64) Bell {
    std::atomic<std::uint32_t> rung, sleepers;

    void ring() noexcept;
    // Returns when `rung` is no longer `seen`, or after `timeout_ms`.
    void sleep(std::uint32_t seen, std::int64_t timeout_ms) noexcept;
};

// How one worker waits for its bell: it spins while that pays. Where another takes its core meanwhile, each turn at it is a
// time slice of the kernel's, a thousand hops long: there it sleeps at once, for a wake-up comes through sooner, and tries
// again after a while that doubles each time.
class Waiter {
  public:
    // Returns when `rung` is no longer `seen`, or after `timeout_ms`. Spins for `spin` at most, then sleeps.
    void rest(Bell& bell, std::uint32_t seen, std::int64_t timeout_ms, std::chrono::microseconds spin) noexcept;

  private:
    using Clock = std::chrono::steady_clock;

    bool spins(const Bell& bell, std::uint32_t seen, std::chrono::microseconds spin) noexcept;
    void note_taken(Clock::time_point now, Clock::duration gap) noexcept;

    Clock::time_point crowded_until_{};
    Clock::duration crowded_for_{};
};

}  // namespace poolweave::decode
