// The kernels for AVX-512 (F, DQ, BW, VL) with products of bfloat16 (AVX512_BF16). CMake compiles this file alone with those
// instructions; nothing in it runs unless the processor has them.
#include <cstdint>

#include "core/decode/kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)
#include "core/decode/kernels.inl"

namespace poolweave::decode {

const Kernels* avx512bf16_kernels() noexcept {
    static constexpr Kernels table{"avx512bf16", true, multiply, arrange, dot, mix, softmax, silu_mul, rms_norm, read, multiply_adds};
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bf16");
    return runs ? &table : nullptr;
}

}  // namespace poolweave::decode
#else
namespace poolweave::decode {

const Kernels* avx512bf16_kernels() noexcept { return nullptr; }

}  // namespace poolweave::decode
#endif
