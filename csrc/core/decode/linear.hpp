// Checked linear layers over the kernels.
#pragma once

#include <cstdint>
#include <string>

#include "core/decode/kernels.hpp"
#include "core/decode/packed.hpp"

namespace poolweave::decode {

// `weight` [out, in] and a bias [out] or null.
struct Linear {
    Packed weight;
    const float* bias = nullptr;

    explicit operator bool() const noexcept { return static_cast<bool>(weight); }
};

// Throws kConfig naming the layer unless its weight is [rows, cols], both at least 1.
void check_linear(const std::string& name, const Packed& weight, std::int64_t rows, std::int64_t cols);

// y [batch, out] = x [batch, in] * weight^T + bias.
inline void apply(const Kernels& kernels, const Linear& layer, const float* x, std::int64_t x_stride, int batch, float* y,
                  std::int64_t y_stride) {
    kernels.multiply(layer.weight, x, x_stride, batch, y, y_stride);
    if (layer.bias == nullptr) return;
    for (int b = 0; b < batch; ++b)
        for (std::int64_t r = 0; r < layer.weight.rows; ++r) y[b * y_stride + r] += layer.bias[r];
}

}  // namespace poolweave::decode
