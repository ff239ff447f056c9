#include "core/eviction_policies.hpp"

#include <functional>
#include <utility>

#include "core/error.hpp"
#include "core/evict_arc.hpp"
#include "core/evict_fifo.hpp"
#include "core/evict_lfu.hpp"
#include "core/evict_s3_fifo.hpp"

namespace poolweave {
namespace {

using Made = std::unique_ptr<EvictionOrder>;
using Make = Made (*)(const EvictionConfig&);

const std::pair<const char*, Make> kPolicies[] = {
    {"lru", [](const EvictionConfig&) -> Made { return nullptr; }},
    {"lfu", [](const EvictionConfig&) -> Made { return std::make_unique<Lfu>(); }},
    {"fifo", [](const EvictionConfig&) -> Made { return std::make_unique<Fifo>(); }},
    {"s3fifo", [](const EvictionConfig& config) -> Made { return std::make_unique<S3Fifo>(config.max_ghosts); }},
    {"arc", [](const EvictionConfig& config) -> Made { return std::make_unique<Arc>(config.max_ghosts); }},
    {"cost-aware", [](const EvictionConfig& config) -> Made { return std::make_unique<CostAware>(config.cost, config.block_tokens); }},
};

}  // namespace

const std::vector<std::string>& eviction_policies() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> all;
        for (const auto& [name, make] : kPolicies) all.emplace_back(name);
        return all;
    }();
    return names;
}

std::unique_ptr<EvictionOrder> make_eviction_order(const EvictionConfig& config) {
    std::string known;
    for (const auto& [name, make] : kPolicies) {
        if (config.policy == name) return make(config);
        known += (known.empty() ? "" : ", ") + std::string(name);
    }
    throw Error(Code::kConfig, "eviction='" + config.policy + "' is no policy; there are " + known);
}

}  // namespace poolweave
