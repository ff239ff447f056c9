#include "core/decode/kernels.hpp"

#include "core/error.hpp"

namespace poolweave::decode {

const Kernels& kernels_named(const std::string& name) {
    const Kernels* avx2 = avx2_kernels();
    if (name == "portable" || (name == "auto" && avx2 == nullptr)) return portable_kernels();
    if (name == "auto" || (name == "avx2" && avx2 != nullptr)) return *avx2;
    throw Error(Code::kConfig, "kernels '" + name + "' do not run here: use 'auto', 'portable'" +
                                   (avx2 != nullptr ? " or 'avx2'" : ""));
}

}  // namespace poolweave::decode
