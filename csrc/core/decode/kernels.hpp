// The inner loops of decoding, in one table an instruction set. Which table runs is chosen once, at run time.
//
// Every result is a function of its own operands alone: how many rows or batch entries a call carries changes neither
// the order nor the grouping of a sum, so a sequence decodes to the same bits in any batch (batch invariance).
#pragma once

#include <cstdint>
#include <string>

#include "core/decode/matrix.hpp"

namespace poolweave::decode {

struct Kernels {
    const char* name;

    // y[b * y_stride + r] = sum over c of w[r][c] * x[b * x_stride + c], for all rows r and b < batch.
    void (*dot)(const Matrix& w, const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride);

    // y[b * y_stride + c] += sum over rows r, in order, of p[b * p_stride + r] * w[r][c], for c < cols.
    void (*mix)(const Matrix& w, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride);

    // s[i] = exp(s[i] * scale - max of them), in place; returns the sum of the results.
    float (*softmax)(float* s, std::int64_t n, float scale);

    // gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i].
    void (*silu_mul)(float* gate, const float* up, std::int64_t n);

    // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
    void (*rms_norm)(const float* x, const float* weight, float eps, float* y, std::int64_t n);

    // Sum of all elements' bit patterns: what a plain streaming read costs; the yardstick of the benchmarks.
    std::uint64_t (*read)(const void* data, std::int64_t nbytes);
};

// The tables this build has for this machine: "portable" always, "avx2" where the processor has AVX2 and FMA.
const Kernels& portable_kernels() noexcept;
const Kernels* avx2_kernels() noexcept;  // null where it cannot run

// The table of that name; "auto" is the fastest one. Throws kConfig for a name this machine cannot run.
const Kernels& kernels_named(const std::string& name);

}  // namespace poolweave::decode
