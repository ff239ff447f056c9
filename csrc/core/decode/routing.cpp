#include "core/decode/routing.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Index of the largest of n, the lowest one among equals.
int best(const float* values, int n) {
    int at = 0;
    for (int i = 1; i < n; ++i)
        if (values[i] > values[at]) at = i;
    return at;
}

}  // namespace

void Routing::validate() const {
    if (experts < 1 || top_k < 1 || top_k > experts)
        throw Error(Code::kConfig, "top_k " + std::to_string(top_k) + " of " + std::to_string(experts) + " experts");
    if (groups < 1 || experts % groups != 0 || top_groups < 1 || top_groups > groups)
        throw Error(Code::kConfig, std::to_string(top_groups) + " of " + std::to_string(groups) + " groups of " +
                                       std::to_string(experts) + " experts");
    if (top_groups * (experts / groups) < top_k)
        throw Error(Code::kConfig, "the chosen groups hold fewer experts than top_k " + std::to_string(top_k));
}

Router::Router(const Routing& routing) : routing_(routing) {
    routing_.validate();
    ranked_.resize(static_cast<std::size_t>(routing.experts));
    group_.resize(static_cast<std::size_t>(routing.groups));
}

void Router::score(float* logits) const {
    const int n = routing_.experts;
    if (routing_.gate == Gate::kSigmoid) {
        for (int e = 0; e < n; ++e) logits[e] = 1.0F / (1.0F + std::exp(-logits[e]));
        return;
    }
    const float most = *std::max_element(logits, logits + n);
    float sum = 0.0F;
    for (int e = 0; e < n; ++e) sum += logits[e] = std::exp(logits[e] - most);
    for (int e = 0; e < n; ++e) logits[e] /= sum;
}

void Router::drop_groups() {
    const int size = routing_.experts / routing_.groups;
    for (int g = 0; g < routing_.groups; ++g) {
        float* scores = ranked_.data() + g * size;
        const int first = best(scores, size);
        group_[g] = scores[first];
        if (routing_.group_score == GroupScore::kSumOfTopTwo && size > 1) {
            float second = kNever;
            for (int e = 0; e < size; ++e)
                if (e != first) second = std::max(second, scores[e]);
            group_[g] += second;
        }
    }
    for (int kept = 0; kept < routing_.top_groups; ++kept) group_[best(group_.data(), routing_.groups)] = kNever;
    for (int g = 0; g < routing_.groups; ++g)  // what was kept is marked, the rest may not be chosen
        if (group_[g] != kNever) std::fill_n(ranked_.data() + g * size, size, kNever);
}

void Router::choose(float* logits, Choice* choices) {
    const int n = routing_.experts, k = routing_.top_k;
    score(logits);
    for (int e = 0; e < n; ++e)
        ranked_[e] = logits[e] + (routing_.choice_bias != nullptr ? routing_.choice_bias[e] : 0.0F);
    if (routing_.top_groups < routing_.groups) drop_groups();
    float sum = 0.0F;
    for (int j = 0; j < k; ++j) {
        const int e = best(ranked_.data(), n);
        ranked_[e] = kNever;
        choices[j] = {e, logits[e]};
        sum += logits[e];
    }
    const float factor = routing_.scale / (routing_.normalise ? sum + 1e-20F : 1.0F);
    for (int j = 0; j < k; ++j) choices[j].weight *= factor;
    std::sort(choices, choices + k, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
}

}  // namespace poolweave::decode
