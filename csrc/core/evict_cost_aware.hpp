// Cost-aware: the run whose loss costs least goes first, by recompute seconds per byte, uses, and time. Source: Cherkasova,
// "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs 1998; the cost is that of
// prefill: a token attends to all before it, so blocks deep in a prompt are dearer than the first ones.
#pragma once

#include <algorithm>

#include "core/eviction_order.hpp"

namespace poolweave {

struct RecomputeCost {
    double seconds_per_token = 1;
    double seconds_per_context_token = 0;  // more for each token of context before it
    double bytes_per_token = 1;
};

class CostAware final : public EvictionOrder {
  public:
    CostAware(const RecomputeCost& cost, std::uint32_t block_tokens) : cost_(cost), block_tokens_(block_tokens) {}

    void give_up(NodeId id, std::uint64_t) noexcept override { floor_ = std::max(floor_, state(id).rank); }

  private:
    void on_use(RunState& run) noexcept override {
        run.base = floor_;  // what was given up meanwhile ages all that is not used
        run.stamp = clock();
        on_resize(run);
    }

    void on_resize(RunState& run) noexcept override {
        const double context = static_cast<double>(run.end - 1) * block_tokens_;
        const double seconds = cost_.seconds_per_token + cost_.seconds_per_context_token * context;
        run.rank = run.base + run.uses * seconds / cost_.bytes_per_token;
    }

    RecomputeCost cost_;
    std::uint32_t block_tokens_;
    double floor_ = 0;
};

}  // namespace poolweave
