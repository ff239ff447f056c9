#include "core/lowest.hpp"

#include <algorithm>
#include <cmath>

namespace poolweave {

std::size_t draw_lowest(std::span<const double> costs, std::uint64_t lot) noexcept {
    const auto lowest = std::min_element(costs.begin(), costs.end());
    const double limit = *lowest + std::abs(*lowest) * 1e-9;
    const auto equal = [limit](double cost) { return cost <= limit; };
    const std::ptrdiff_t ties = std::max<std::ptrdiff_t>(std::count_if(costs.begin(), costs.end(), equal), 1);
    std::uint64_t skip = lot % static_cast<std::uint64_t>(ties);
    for (std::size_t i = 0; i < costs.size(); ++i) {
        if (equal(costs[i]) && skip-- == 0) return i;
    }
    return static_cast<std::size_t>(lowest - costs.begin());
}

}  // namespace poolweave
