// Binding of the stream concept: data connections, the sender's server and pulls. See csrc/core/{wire,stream}.hpp.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "bindings/registry.hpp"
#include "core/error.hpp"
#include "core/stream.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

using Words = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kLongest_s = 1e9;

std::chrono::nanoseconds nanoseconds(double seconds) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest_s)));
}

}  // namespace

void register_stream(nb::module_& m) {
    nb::class_<Wire>(m, "Wire", "Owns a connected socket of the data plane.")
        .def(nb::init<int>(), "fd"_a)
        .def("shut_down", &Wire::shut_down);
    nb::class_<StreamServer>(m, "StreamServer", "The sender's side of the data plane.")
        .def(
            "__init__",
            [](StreamServer* self, double stall_s, double idle_s) {
                new (self) StreamServer({nanoseconds(stall_s), nanoseconds(idle_s)});
            },
            "stall_s"_a, "idle_s"_a)
        .def(
            "publish",
            [](StreamServer& self, std::uint64_t offer, std::uint64_t nonce, const Extents& extents, double lifetime_s) {
                self.publish(offer, nonce, std::make_shared<const Extents>(extents), nanoseconds(lifetime_s));
            },
            "offer"_a, "nonce"_a, "extents"_a, "lifetime_s"_a, "Copies `extents`; its memory must outlive the offer.")
        .def("revoke", &StreamServer::revoke, "offer"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("adopt", &StreamServer::adopt, "fd"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &StreamServer::close, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("num_connections", &StreamServer::num_connections, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("bytes_sent", &StreamServer::bytes_sent);
    nb::class_<Pull>(m, "Pull", "Which blocks of which offer to ask for.")
        .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t, std::uint32_t>(), nb::kw_only(), "offer"_a, "nonce"_a,
             "first_block"_a, "chunk_bytes"_a);
    m.def(
        "pull_blocks",
        [](const std::vector<Wire*>& wires, const Pull& pull, const Extents& target, double stall_s, double timeout_s,
           const Abort& abort, const std::optional<Words>& hashes) {
            if (hashes && hashes->size() != target.num_blocks()) throw Error(Code::kConfig, "one hash a block is needed");
            std::uint64_t* const out = hashes ? hashes->data() : nullptr;
            const Patience patience{nanoseconds(stall_s), Clock::now() + nanoseconds(timeout_s), &abort};
            const nb::gil_scoped_release nogil;
            return pull_blocks(wires, pull, target, patience, out);
        },
        "wires"_a, "pull"_a, "target"_a, "stall_s"_a, "timeout_s"_a, "abort"_a, "hashes"_a.none() = nb::none(),
        "Receive the blocks of `target` over all `wires` at once.");
}

}  // namespace poolweave::bindings
