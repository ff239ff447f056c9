// What happens when in a simulation, in order; ties happen in the order in which they were planned.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

namespace poolweave::simulation {

enum class Happening : std::uint8_t { kCall, kArrival, kPrefilled, kHandedOver, kDecoded, kReturned, kReplicated };

// `a` and `b` are what the happening is about: a life, a job, a version.
struct Planned {
    double time_s;
    std::uint64_t order;
    Happening what;
    std::uint32_t a;
    std::uint64_t b;

    bool operator<(const Planned& other) const noexcept {  // for a heap: the latest is the least
        return time_s != other.time_s ? time_s > other.time_s : order > other.order;
    }
};

class Timeline {
  public:
    double now() const noexcept { return now_; }
    std::size_t size() const noexcept { return planned_.size(); }

    // At this time, or now if that has passed.
    void at(double time_s, Happening what, std::uint32_t a, std::uint64_t b) { planned_.push({std::max(time_s, now_), ++orders_, what, a, b}); }
    void after(double seconds, Happening what, std::uint32_t a, std::uint64_t b) { at(now_ + seconds, what, a, b); }

    // Arrival i at the i-th of these times, which ascend: as `at` for each, but one at a time is kept.
    void arrivals(std::vector<double> times_s) {
        arrivals_ = std::move(times_s);
        begun_s_ = now_;
        first_ = orders_ + 1;
        orders_ += arrivals_.size();
        plan_arrival(0);
    }

    // The next happening, whose time it now is. There must be one.
    Planned pop() {
        const Planned next = planned_.top();
        planned_.pop();
        now_ = next.time_s;
        if (next.what == Happening::kArrival) plan_arrival(next.a + 1);
        return next;
    }

  private:
    void plan_arrival(std::uint32_t i) {
        if (i < arrivals_.size()) planned_.push({std::max(arrivals_[i], begun_s_), first_ + i, Happening::kArrival, i, 0});
    }

    double now_ = 0.0;
    std::uint64_t orders_ = 0;
    std::priority_queue<Planned> planned_;
    std::vector<double> arrivals_;
    double begun_s_ = 0.0;
    std::uint64_t first_ = 0;
};

}  // namespace poolweave::simulation
