// Binding of the radix concept; see csrc/core.
#include "bindings/registry.hpp"

namespace poolweave::bindings {

void register_radix(nanobind::module_&) {}

}  // namespace poolweave::bindings
