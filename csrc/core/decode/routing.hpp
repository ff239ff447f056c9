// Which experts a token goes to, and with what weight: the gates of Mixtral, Qwen3-MoE, DeepSeek-V2 and GLM-4.7-Flash.
#pragma once

#include <cstdint>
#include <vector>

namespace poolweave::decode {

enum class Gate : std::uint8_t { kSoftmax, kSigmoid };
enum class GroupScore : std::uint8_t { kMax, kSumOfTopTwo };

struct Routing {
    int experts = 0;
    int top_k = 0;
    Gate gate = Gate::kSoftmax;
    bool normalise = false;  // the chosen weights add up to 1 (before scaling)
    float scale = 1.0F;
    int groups = 1;  // experts are chosen from the best `top_groups` of `groups` equal groups
    int top_groups = 1;
    GroupScore group_score = GroupScore::kMax;
    const float* choice_bias = nullptr;  // [experts], added for the choice alone, not to the weights; or null

    // Throws kConfig for numbers that contradict each other.
    void validate() const;
};

struct Choice {
    int expert;
    float weight;
};

// Turns one token's router logits into its choices.
class Router {
  public:
    explicit Router(const Routing& routing);

    const Routing& routing() const noexcept { return routing_; }

    // `logits` [experts] is overwritten; `choices` [top_k] is filled in order of expert number, so that adding up
    // experts has one order. Equal scores: the lower number wins.
    void choose(float* logits, Choice* choices);

  private:
    void score(float* logits) const;
    void drop_groups();

    Routing routing_;
    std::vector<float> ranked_;  // scores the choice is made by
    std::vector<float> group_;
};

}  // namespace poolweave::decode
