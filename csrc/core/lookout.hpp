// How long to look for something before sleeping for it: as long as is allowed where that has paid, else not at all.
#pragma once

#include <algorithm>
#include <chrono>

namespace poolweave {

// Being woken costs more than a look; but looking in vain delays whoever needs the core, and who looks on a core that
// others want loses it for milliseconds just when the answer comes, where a sleeper would be let in at once. So it stops
// where the clock shows that the core was taken away, and after each vain time it lets more waits pass before the next.
// Not thread-safe.
class Lookout {
  public:
    using Clock = std::chrono::steady_clock;

    // Calls `ready` until it says yes or `most` is over. Returns its last word.
    template <typename Ready>
    bool look(std::chrono::nanoseconds most, const Ready& ready) {
        if (ready()) return true;
        if (most.count() <= 0) return false;
        if (passing_ > 0) {
            --passing_;
            return false;
        }
        const auto end = Clock::now() + most;
        for (auto last = Clock::now(); last < end;) {
            pause();
            const bool yes = ready();
            const auto now = Clock::now();
            if (now - last > kTaken) {
                give_up();
                return yes;
            }
            if (yes) {
                vain_ = 0;
                return true;
            }
            last = now;
        }
        give_up();
        return false;
    }

    // Waits that will not look.
    unsigned passing() const noexcept { return passing_; }

  private:
    static constexpr std::chrono::microseconds kTaken{50};
    static constexpr unsigned kMostVain = 10;

    void give_up() noexcept {
        passing_ = (1u << vain_) - 1;
        vain_ = std::min(vain_ + 1, kMostVain);
    }

    static void pause() noexcept {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    unsigned vain_ = 0;     // times in a row
    unsigned passing_ = 0;
};

}  // namespace poolweave
