// Binding of the eviction policies' names and settings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/registry.hpp"
#include "core/eviction_policies.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

void register_eviction(nb::module_& m) {
    nb::class_<RecomputeCost>(m, "RecomputeCost", "What losing a block costs; see index/eviction.py.")
        .def("__init__", [](RecomputeCost* self, double per_token, double per_context_token, double bytes_per_token) {
            new (self) RecomputeCost{per_token, per_context_token, bytes_per_token};
        }, "seconds_per_token"_a = 1.0, "seconds_per_context_token"_a = 0.0, "bytes_per_token"_a = 1.0)
        .def_ro("seconds_per_token", &RecomputeCost::seconds_per_token)
        .def_ro("seconds_per_context_token", &RecomputeCost::seconds_per_context_token)
        .def_ro("bytes_per_token", &RecomputeCost::bytes_per_token);
    m.def("eviction_policies", &eviction_policies, "The names of all policies.");
}

}  // namespace poolweave::bindings
