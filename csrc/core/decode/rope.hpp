// Rotary position embedding in the three forms that models store their keys in.
#pragma once

#include <cstdint>
#include <vector>

namespace poolweave::decode {

enum class RopeForm : std::uint8_t {
    kHalves,             // pairs (i, i + d/2): Llama, Qwen3, Mixtral
    kInterleaved,        // pairs (2i, 2i + 1), rotated in place: DeepSeek-V2
    kInterleavedToHalves  // pairs (2i, 2i + 1), results at i and i + d/2: GLM-4.7-Flash
};

// Angles come from `inv_freq`, one a pair, times the position; `scale` multiplies sine and cosine (YaRN). One thread at a
// time: the tables of the positions used last are kept, as every layer of a step asks for the same few.
class Rope {
  public:
    // Throws kConfig without frequencies.
    Rope(std::vector<float> inv_freq, float scale, RopeForm form);

    std::int64_t dim() const noexcept { return 2 * static_cast<std::int64_t>(inv_freq_.size()); }

    // cos then sin of every pair at `position` (not negative), [dim]; valid until the next call.
    const float* angles(std::int32_t position) noexcept;

    // Rotate one head of `dim` numbers in place, with the table of its position.
    void rotate(float* head, const float* table) noexcept;

  private:
    std::vector<float> inv_freq_;
    float scale_;
    RopeForm form_;
    std::vector<std::int32_t> kept_;  // the position in each place of the cache, -1 for none
    std::vector<float> tables_;
    std::vector<float> odd_;  // a head's second numbers, on their way
};

}  // namespace poolweave::decode
