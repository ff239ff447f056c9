// The kernels for any machine, in its baseline instruction set.
#include <cstdint>

#include "core/decode/kernels.hpp"
#include "core/decode/kernels.inl"

namespace poolweave::decode {

const Kernels& portable_kernels() noexcept {
    static constexpr Kernels table{"portable", false, multiply, arrange, dot, mix, softmax, silu_mul, rms_norm, read, multiply_adds};
    return table;
}

}  // namespace poolweave::decode
