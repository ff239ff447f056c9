// Binding of the decode executors; see csrc/core/decode. Arrays are borrowed, and kept alive by the stack they went into.
#include "bindings/decode.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/registry.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

void register_decode(nb::module_& m) {
    nb::class_<PackedWeight>(m, "PackedWeight", "A matrix in its WeightStore.");
    nb::class_<Store>(m, "WeightStore", "Weights packed one by one, in the order in which decoding streams them.")
        .def(nb::init<>())
        .def("pack", &Store::pack, "array"_a, nb::sig("def pack(self, array: numpy.typing.NDArray[typing.Any]) -> PackedWeight"),
             "A copy, which lives as long as what is built of it.");
    nb::class_<Ffn>(m, "FfnStack", "FFN layers of one model, natively; one thread at a time.")
        .def("__init__", [](Ffn* self, std::int64_t hidden, const std::string& kernels) {
            new (self) Ffn{decode::FfnStack(decode::kernels_named(kernels), hidden), {}};
        }, "hidden"_a, "kernels"_a = "auto")
        .def("add_dense", &Ffn::add_dense, "weights"_a)
        .def("add_moe", &Ffn::add_moe, "weights"_a, "sizes"_a)
        .def("forward", &Ffn::forward, "layer"_a, "x"_a, "out"_a)
        .def("active_bytes", [](const Ffn& self, std::int64_t layer) { return self.stack.active_bytes(layer); }, "layer"_a)
        .def_prop_ro("num_layers", [](const Ffn& self) { return self.stack.layers(); });
    nb::class_<Kv>(m, "KvView", "A pool's view of [slots, layers, parts, block_tokens, heads, dim], kept alive.")
        .def(nb::init<nb::ndarray<nb::ndim<6>, nb::device::cpu>>(), "array"_a,
             nb::sig("def __init__(self, array: numpy.typing.NDArray[typing.Any]) -> None"));
    nb::class_<Attention>(m, "AttentionStack", "The KV side of one model, natively; one thread at a time.")
        .def(nb::init<std::int64_t, const Named&, std::vector<float>, float, int, const std::string&>(), "hidden"_a, "ends"_a, "inv_freq"_a,
             "rope_scale"_a, "rope_form"_a, "kernels"_a = "auto")
        .def("add_grouped", &Attention::add_grouped, "weights"_a, "sizes"_a)
        .def("add_latent", &Attention::add_latent, "weights"_a, "sizes"_a)
        .def("embed", &Attention::embed, "tokens"_a, "residual"_a)
        .def("attend", &Attention::attend, "layer"_a, "kv"_a, "positions"_a, "slots"_a, "delta"_a.none(), "residual"_a,
             "normed"_a)
        .def("logits", &Attention::logits, "delta"_a.none(), "residual"_a, "out"_a)
        .def_prop_ro("num_layers", [](const Attention& self) { return self.stack.layers(); });
    m.def("streaming_read", [](const AnyArray& array, const std::string& kernels) {
        nb::gil_scoped_release release;
        return decode::kernels_named(kernels).read(array.data(), static_cast<std::int64_t>(array.nbytes()));
    }, "array"_a, "kernels"_a = "auto",
       nb::sig("def streaming_read(array: numpy.typing.NDArray[typing.Any], kernels: str = 'auto') -> int"), "Read an array once and do nothing with it: what the benchmarks compare with.");
    m.def("multiply_adds", [](std::int64_t count, const std::string& kernels) {
        nb::gil_scoped_release release;
        return decode::kernels_named(kernels).multiply_adds(count);
    }, "count"_a, "kernels"_a = "auto", "Do so many multiply-adds in registers: what the benchmarks compare with.");
    m.def("kernel_names", [] {
        std::vector<std::string> names;
        for (const auto* table : decode::kernel_tables()) names.emplace_back(table->name);
        return names;
    }, "Kernel tables that run on this machine.");
}

}  // namespace poolweave::bindings
