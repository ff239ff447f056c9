// What parallel readers of a tree leave behind: which nodes they used, for the recency lists, and how lookups went.
//
// A reader writes to one of a few places, picked by its thread as the lock's lines are, so parallel readers share no
// cache line. A full place is handed on at once, the others by the next who is alone: uses of one thread keep their
// order, of those of several threads the last few may change places.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/miss_reasons.hpp"
#include "core/radix_node.hpp"
#include "core/shared_lock.hpp"

namespace poolweave {

struct LookupCounts {
    std::uint64_t lookups = 0, asked_blocks = 0, hit_blocks = 0;
    std::uint64_t misses[kMissReasons] = {};
};

class ReadLog {
  public:
    // One lookup, which used `node` unless that is kNoNode. Calls use(node, now_ns) for all that was noted in this
    // place when it is full; such calls are made one at a time.
    template <class Apply>
    void note(NodeId node, std::int64_t now_ns, const LookupCounts& counts, Apply&& use) noexcept {
        Place& place = places_[SharedLock::line()];
        const std::lock_guard one_at_a_time(place.mutex);  // more threads than places: some share one
        add(place.counts, counts);
        if (node == kNoNode) return;
        place.uses[place.num_uses++] = {now_ns, node};
        if (place.num_uses == kFull) {
            const std::lock_guard all_in_turn(applying_);
            hand_on(place, use);
        } else if (!any_.load(std::memory_order_relaxed)) {
            any_.store(true, std::memory_order_relaxed);
        }
    }

    // Calls use(node, now_ns) for all that was noted anywhere. Only for who is alone.
    template <class Apply>
    void drain(Apply&& use) noexcept {
        if (!any_.load(std::memory_order_relaxed)) return;
        any_.store(false, std::memory_order_relaxed);
        for (Place& place : places_) hand_on(place, use);
    }

    // Only for who is alone.
    LookupCounts counts() const noexcept {
        LookupCounts sum;
        for (const Place& place : places_) add(sum, place.counts);
        return sum;
    }

  private:
    static constexpr std::size_t kFull = 8;

    struct Use {
        std::int64_t now_ns;
        NodeId node;
    };
    struct alignas(64) Place {
        std::mutex mutex;
        std::size_t num_uses = 0;
        std::array<Use, kFull> uses;
        LookupCounts counts;
    };

    template <class Apply>
    static void hand_on(Place& place, Apply&& use) noexcept {
        for (std::size_t i = 0; i < place.num_uses; ++i) use(place.uses[i].node, place.uses[i].now_ns);
        place.num_uses = 0;
    }

    static void add(LookupCounts& sum, const LookupCounts& more) noexcept {
        sum.lookups += more.lookups;
        sum.asked_blocks += more.asked_blocks;
        sum.hit_blocks += more.hit_blocks;
        for (std::size_t i = 0; i < kMissReasons; ++i) sum.misses[i] += more.misses[i];
    }

    std::array<Place, SharedLock::kLines> places_{};
    std::atomic<bool> any_{false};
    std::mutex applying_;
};

}  // namespace poolweave
