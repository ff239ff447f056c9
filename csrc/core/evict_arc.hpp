// ARC: runs used once and runs used again, each by recency, with a memory of what either gave up; what is asked for again
// out of a memory gives that side more room. Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement
// cache", FAST 2003. The cache's size is what the index holds when it must give something up.
#pragma once

#include <algorithm>

#include "core/eviction_order.hpp"
#include "core/ghost_list.hpp"

namespace poolweave {

class Arc final : public EvictionOrder {
  public:
    explicit Arc(std::size_t ghosts) : once_ghosts_(ghosts), again_ghosts_(ghosts) {}

    bool wants_names() const noexcept override { return true; }

    void give_up(NodeId id, std::uint64_t name) noexcept override {
        if (state(id).band == kOnce) {
            once_ghosts_.push(name, all_blocks());
        } else {
            again_ghosts_.push(name, all_blocks());
        }
    }

  private:
    static constexpr std::uint8_t kOnce = 0;
    static constexpr std::uint8_t kAgain = 1;

    void on_enter(RunState& run, Names names) noexcept override {
        for (std::size_t i = 0; i < names.size(); ++i) {
            const double once = static_cast<double>(once_ghosts_.size());
            const double again = static_cast<double>(again_ghosts_.size());
            bool known = true;
            if (once_ghosts_.take(names[i])) {
                target_ = std::min(target_ + std::max(1.0, again / once), static_cast<double>(all_blocks()));
            } else if (again_ghosts_.take(names[i])) {
                target_ = std::max(target_ - std::max(1.0, once / again), 0.0);
            } else {
                known = false;
            }
            if (i == 0 && known) run.band = kAgain;
        }
    }

    void on_use(RunState& run) noexcept override {
        run.uses = std::min(run.uses, 2u);
        if (run.uses == 2) run.band = kAgain;
        run.stamp = clock();
    }

    std::size_t choose() noexcept override {
        const std::size_t band = forced_band();
        if (band != kBands) return band;
        return static_cast<double>(band_blocks(kOnce)) > target_ ? kOnce : kAgain;
    }

    std::size_t ghost_bytes() const noexcept override { return once_ghosts_.nbytes() + again_ghosts_.nbytes(); }

    GhostList once_ghosts_;
    GhostList again_ghosts_;
    double target_ = 0;  // blocks that those used once may hold
};

}  // namespace poolweave
