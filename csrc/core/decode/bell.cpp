#include "core/decode/bell.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace poolweave::decode {

namespace {

constexpr std::chrono::microseconds kAlone(20);     // how long a spinning worker keeps its core to itself
constexpr std::chrono::microseconds kTaken(200);    // a gap in a spin this long: somebody else had the core
constexpr int kOften = 4;                            // the core counts as shared for so many times that gap
constexpr std::chrono::milliseconds kCrowdedMost(1000);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) noexcept {
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void Bell::ring() noexcept {
    rung.fetch_add(1);
    if (sleepers.load() != 0) futex(&rung, FUTEX_WAKE, INT_MAX, nullptr);
}

void Bell::sleep(std::uint32_t seen, std::int64_t timeout_ms) noexcept {
    sleepers.fetch_add(1);
    const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1000000};
    if (rung.load() == seen) futex(&rung, FUTEX_WAIT, seen, &timeout);  // returns at once if it was rung since
    sleepers.fetch_sub(1);
}

void Waiter::rest(Bell& bell, std::uint32_t seen, std::int64_t timeout_ms, std::chrono::microseconds spin) noexcept {
    if (!spins(bell, seen, spin)) bell.sleep(seen, timeout_ms);
}

// -> whether it was rung meanwhile.
bool Waiter::spins(const Bell& bell, std::uint32_t seen, std::chrono::microseconds spin) noexcept {
    const auto start = Clock::now();
    if (start < crowded_until_) return false;
    for (auto last = start, now = start; now - start < spin; last = now) {
        for (int i = 0; i < 64; ++i) {
            if (bell.rung.load(std::memory_order_acquire) != seen) return true;
            pause();
        }
        if (now - start > kAlone) sched_yield();
        now = Clock::now();
        if (now - last > kTaken) {
            note_taken(now, now - last);
            return false;
        }
    }
    return false;
}

// Somebody had the core for `gap`. Once in a while that costs less than sleeping would; soon after the last time it is a rule.
void Waiter::note_taken(Clock::time_point now, Clock::duration gap) noexcept {
    const bool again = now - crowded_until_ < kOften * crowded_for_;
    crowded_for_ = std::min<Clock::duration>(again ? 2 * crowded_for_ : kOften * gap, kCrowdedMost);
    crowded_until_ = now + crowded_for_;
}

}  // namespace poolweave::decode
