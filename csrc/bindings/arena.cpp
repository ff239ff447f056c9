// Binding of the arena concept; see csrc/core.
#include "bindings/registry.hpp"

namespace poolweave::bindings {

void register_arena(nanobind::module_&) {}

}  // namespace poolweave::bindings
