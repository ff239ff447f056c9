// The next token from logits, on the KV side: greedy, or temperature and top-p with a draw that a replay repeats.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace poolweave::decode {

struct Sampling {
    float temperature = 0.0F;  // 0: the largest logit, the lowest id among equals
    float top_p = 1.0F;
    std::uint64_t seed = 0;
};

class Sampler {
  public:
    // The draw depends on the seed and the position alone: not on the batch, and the same when decoded again.
    std::int32_t next(std::span<const float> logits, const Sampling& sampling, std::int32_t position);

  private:
    std::vector<std::int32_t> order_;
    std::vector<double> weights_;
};

}  // namespace poolweave::decode
