#include "core/decode/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace poolweave::decode {

namespace {

// Uniform in [0, 1) from two numbers: splitmix64.
double uniform(std::uint64_t seed, std::uint64_t position) {
    std::uint64_t z = seed + (position + 1) * 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

}  // namespace

std::int32_t Sampler::next(std::span<const float> logits, const Sampling& sampling, std::int32_t position) {
    const auto top = std::max_element(logits.begin(), logits.end());
    if (sampling.temperature <= 0.0F) return static_cast<std::int32_t>(top - logits.begin());
    order_.resize(logits.size());
    weights_.resize(logits.size());
    std::iota(order_.begin(), order_.end(), 0);
    double sum = 0.0;
    for (std::size_t i = 0; i < logits.size(); ++i)
        sum += weights_[i] = std::exp((static_cast<double>(logits[i]) - *top) / sampling.temperature);
    if (sampling.top_p < 1.0F)  // the draw below walks the ids from the likeliest down
        std::sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
            return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
        });
    const double kept = sum * std::min<double>(sampling.top_p, 1.0);
    double mass = 0.0;
    std::size_t count = 0;
    while (count < order_.size() && mass < kept) mass += weights_[order_[count++]];
    double left = uniform(sampling.seed, static_cast<std::uint64_t>(position)) * mass;
    for (std::size_t i = 0; i + 1 < count; ++i) {
        left -= weights_[order_[i]];
        if (left < 0.0) return order_[i];
    }
    return order_[count > 0 ? count - 1 : 0];
}

}  // namespace poolweave::decode
