#include "core/decode/rope.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr std::int32_t kKept = 64;

}  // namespace

Rope::Rope(std::vector<float> inv_freq, float scale, RopeForm form)
    : inv_freq_(std::move(inv_freq)), scale_(scale), form_(form), kept_(kKept, -1), tables_(kKept * 2 * inv_freq_.size()),
      odd_(inv_freq_.size()) {
    if (inv_freq_.empty()) throw Error(Code::kConfig, "rope needs at least one frequency");
}

const float* Rope::angles(std::int32_t position) noexcept {
    const auto pairs = inv_freq_.size();
    const auto place = static_cast<std::size_t>(position % kKept);
    float* table = tables_.data() + place * 2 * pairs;
    if (kept_[place] == position) return table;
    for (std::size_t i = 0; i < pairs; ++i) {
        const float angle = static_cast<float>(position) * inv_freq_[i];
        table[i] = std::cos(angle) * scale_;
        table[pairs + i] = std::sin(angle) * scale_;
    }
    kept_[place] = position;
    return table;
}

void Rope::rotate(float* head, const float* table) noexcept {
    const std::int64_t pairs = dim() / 2;
    const float *cos = table, *sin = table + pairs;
    if (form_ == RopeForm::kHalves) {
        for (std::int64_t i = 0; i < pairs; ++i) {
            const float a = head[i], b = head[i + pairs];
            head[i] = a * cos[i] - b * sin[i];
            head[i + pairs] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (std::int64_t i = 0; i < pairs; ++i) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cos[i] - b * sin[i];
        head[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    if (form_ == RopeForm::kInterleaved) return;
    for (std::int64_t i = 0; i < pairs; ++i) odd_[i] = head[2 * i + 1];
    for (std::int64_t i = 0; i < pairs; ++i) head[i] = head[2 * i];
    std::copy_n(odd_.data(), pairs, head + pairs);
}

}  // namespace poolweave::decode
