// The inner loops of decoding, in one table an instruction set. Which table runs is chosen once, at run time.
//
// Every result is a function of its own operands alone: how many rows or batch entries a call carries changes neither
// the order nor the grouping of a sum, so a sequence decodes to the same bits in any batch (batch invariance).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/decode/matrix.hpp"
#include "core/decode/packed.hpp"

namespace poolweave::decode {

// Numbers that `arrange` writes at most, for which rows begin on a cache line.
constexpr std::int64_t arranged_size(std::int64_t batch, std::int64_t cols) noexcept { return 2 * batch * (cols + 16) / 16 * 16 + 16; }

struct Kernels {
    const char* name;
    bool rounds;  // to bfloat16 what meets bfloat16 KV, as tensor cores do; takes its rows in pairs, from a block's first on

    // y[b * y_stride + r] = sum over c of w[r][c] * x[b * x_stride + c], for all rows r and b < batch: weights, read once.
    void (*multiply)(const Packed& w, const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride);

    // Brings rows of x [batch, cols] into the order in which `dot` reads them beside KV of that type; out has room for
    // arranged_size(batch, cols) numbers.
    void (*arrange)(const float* x, std::int64_t x_stride, int batch, std::int64_t cols, Dtype dtype, float* out);

    // y[b * y_stride + r] = sum over c of w[r][c] * x[b][c] over rows of KV, for arranged rows of x. The order of a sum may
    // follow from `batch`: these are the heads that share KV, a model's own number.
    void (*dot)(const KvRows& w, const float* x, int batch, float* y, std::int64_t y_stride);

    // y[b * y_stride + c] += sum over rows r, in order, of p[b * p_stride + r] * w[r][c], for c < cols.
    void (*mix)(const KvRows& w, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride);

    // s[i] = exp(s[i] * scale - max of them), in place; returns the sum of the results.
    float (*softmax)(float* s, std::int64_t n, float scale);

    // gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i].
    void (*silu_mul)(float* gate, const float* up, std::int64_t n);

    // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
    void (*rms_norm)(const float* x, const float* weight, float eps, float* y, std::int64_t n);

    // Sum of all elements' bit patterns: what a plain streaming read costs; a yardstick of the benchmarks.
    std::uint64_t (*read)(const void* data, std::int64_t nbytes);

    // At least so many multiply-adds, all in registers: what they cost at best; the other yardstick.
    float (*multiply_adds)(std::int64_t count);
};

// The tables this build has for this machine: "portable" always, "avx2" where the processor has AVX2 and FMA, "avx512"
// where it has AVX-512 F, DQ, BW and VL, "avx512bf16" where it has AVX512_BF16 too.
const Kernels& portable_kernels() noexcept;
const Kernels* avx2_kernels() noexcept;    // null where it cannot run
const Kernels* avx512_kernels() noexcept;  // the same
const Kernels* avx512bf16_kernels() noexcept;

// All that run here, the fastest one last.
std::vector<const Kernels*> kernel_tables();

// The table of that name; "auto" is the fastest one. Throws kConfig for a name this machine cannot run.
const Kernels& kernels_named(const std::string& name);

}  // namespace poolweave::decode
