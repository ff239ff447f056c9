// Binding of the blocks concept; see csrc/core.
#include "bindings/registry.hpp"

namespace poolweave::bindings {

void register_blocks(nanobind::module_&) {}

}  // namespace poolweave::bindings
