// FIFO: the run that was inserted first goes first, used or not.
#pragma once

#include "core/eviction_order.hpp"

namespace poolweave {

class Fifo final : public EvictionOrder {
    void on_use(RunState& run) noexcept override {
        if (run.uses == 1) run.stamp = clock();
        run.uses = 1;
    }
};

}  // namespace poolweave
