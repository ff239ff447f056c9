// Choosing the lowest of many costs, fairly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace poolweave {

// Index of the lowest of `costs`, which is not empty; where several are lowest up to a relative 1e-9 (predictions are
// not known better), the one that the number `lot` falls on. Where a cost is not a number: any index.
std::size_t draw_lowest(std::span<const double> costs, std::uint64_t lot) noexcept;

}  // namespace poolweave
