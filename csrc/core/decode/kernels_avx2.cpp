// The kernels for AVX2 and FMA. CMake compiles this file alone with those instructions; nothing in it runs unless the
// processor has them.
#include <cstdint>

#include "core/decode/kernels.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "core/decode/kernels.inl"

namespace poolweave::decode {

const Kernels* avx2_kernels() noexcept {
    static constexpr Kernels table{"avx2", false, multiply, arrange, dot, mix, softmax, silu_mul, rms_norm, read, multiply_adds};
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &table : nullptr;
}

}  // namespace poolweave::decode
#else
namespace poolweave::decode {

const Kernels* avx2_kernels() noexcept { return nullptr; }

}  // namespace poolweave::decode
#endif
