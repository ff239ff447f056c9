// Binding of the stream concept; see csrc/core.
#include "bindings/registry.hpp"

namespace poolweave::bindings {

void register_stream(nanobind::module_&) {}

}  // namespace poolweave::bindings
