// Binding of the copy concept; see csrc/core.
#include "bindings/registry.hpp"

namespace poolweave::bindings {

void register_copy(nanobind::module_&) {}

}  // namespace poolweave::bindings
