// LFU: the run that was used least often goes first; of those, the one whose last use is longest ago.
#pragma once

#include "core/eviction_order.hpp"

namespace poolweave {

class Lfu final : public EvictionOrder {
    void on_use(RunState& run) noexcept override {
        run.rank = run.uses;
        run.stamp = clock();
    }
};

}  // namespace poolweave
