// The eviction policies by name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/evict_cost_aware.hpp"
#include "core/eviction_order.hpp"

namespace poolweave {

struct EvictionConfig {
    std::string policy = "lru";
    RecomputeCost cost;
    std::uint32_t block_tokens = 16;
    std::size_t max_ghosts = 0;
};

const std::vector<std::string>& eviction_policies();
// nullptr for "lru", which the recency lists of the tree serve. Throws Error(kConfig) for a name that is none.
std::unique_ptr<EvictionOrder> make_eviction_order(const EvictionConfig& config);

}  // namespace poolweave
