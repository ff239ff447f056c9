#include "core/decode/kernels.hpp"

#include "core/error.hpp"

namespace poolweave::decode {

std::vector<const Kernels*> kernel_tables() {
    std::vector<const Kernels*> tables{&portable_kernels()};
    for (const Kernels* table : {avx2_kernels(), avx512_kernels(), avx512bf16_kernels()})
        if (table != nullptr) tables.push_back(table);
    return tables;
}

const Kernels& kernels_named(const std::string& name) {
    const auto tables = kernel_tables();
    if (name == "auto") return *tables.back();
    std::string names = "'auto'";
    for (const Kernels* table : tables) {
        if (name == table->name) return *table;
        names.append(", '").append(table->name).append("'");
    }
    throw Error(Code::kConfig, "kernels '" + name + "' do not run here: use one of " + names);
}

}  // namespace poolweave::decode
