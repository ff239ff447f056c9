// S3-FIFO: a small queue of newcomers, a tenth of all blocks, a main one with second chances, and a memory of newcomers
// that were given up. Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
#pragma once

#include <algorithm>

#include "core/eviction_order.hpp"
#include "core/ghost_list.hpp"

namespace poolweave {

class S3Fifo final : public EvictionOrder {
  public:
    explicit S3Fifo(std::size_t ghosts) : ghosts_(ghosts) {}

    bool wants_names() const noexcept override { return true; }

    void give_up(NodeId id, std::uint64_t name) noexcept override {
        if (state(id).band == kSmall) ghosts_.push(name, all_blocks() - all_blocks() / kSmallShare);
    }

  private:
    static constexpr std::uint8_t kSmall = 0;
    static constexpr std::uint8_t kMain = 1;
    static constexpr std::size_t kSmallShare = 10;   // one in ten blocks
    static constexpr std::uint32_t kMostReuses = 3;
    static constexpr std::uint32_t kPromoted = 2;    // reuses that take a newcomer to the main queue

    static std::uint32_t reuses(const RunState& run) noexcept { return run.uses - 1; }

    void on_enter(RunState& run, Names names) noexcept override {
        bool known = false;
        for (std::size_t i = 0; i < names.size(); ++i) known |= ghosts_.take(names[i]) && i == 0;
        run.band = known ? kMain : kSmall;
    }

    void on_use(RunState& run) noexcept override {
        if (run.uses == 1) run.stamp = clock();
        run.uses = std::min(run.uses, kMostReuses + 1);
    }

    std::size_t choose() noexcept override {
        while (true) {  // each turn moves a run up or takes one of its reuses
            std::size_t band = forced_band();
            if (band == kBands) {
                const std::size_t total = band_blocks(kSmall) + band_blocks(kMain);
                band = band_blocks(kSmall) * kSmallShare >= total ? kSmall : kMain;
            }
            const NodeId id = front(band);
            if (reuses(state(id)) < (band == kSmall ? kPromoted : 1)) return band;
            requeue(id, [&](RunState& run) {
                run.uses = run.band == kSmall ? 1 : run.uses - 1;
                run.band = kMain;
                run.stamp = next_stamp();
            });
        }
    }

    std::size_t ghost_bytes() const noexcept override { return ghosts_.nbytes(); }

    GhostList ghosts_;
};

}  // namespace poolweave
