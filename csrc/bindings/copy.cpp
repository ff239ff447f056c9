// Binding of the copy concept: grids, windows, extents, guarded copies and block hashes. See csrc/core/{extents,copy}.hpp.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>

#include "bindings/registry.hpp"
#include "core/copy.hpp"
#include "core/error.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = Array<std::uint64_t>;
using ConstWords = Array<const std::uint64_t>;

template <typename T>
std::span<const T> view(const Array<const T>& array) {
    return {array.data(), array.size()};
}

void check_index(std::size_t size, std::size_t index) {
    if (index >= size) throw Error(Code::kConfig, "a lease word lies outside its table");
}

std::uint64_t* hashes_of(const std::optional<Words>& hashes, std::size_t count) {
    if (!hashes) return nullptr;
    if (hashes->size() != count) throw Error(Code::kConfig, "one hash a block is needed");
    return hashes->data();
}

void register_extents(nb::module_& m) {
    nb::class_<Grid>(m, "Grid", "Memory of one tier as slots x planes x rows, by strides.")
        .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint32_t,
                      std::uint32_t, std::uint32_t>(),
             nb::kw_only(), "base"_a, "nbytes"_a, "slot_stride"_a, "plane_stride"_a, "row_stride"_a, "row_bytes"_a,
             "num_slots"_a, "num_planes"_a, "num_rows"_a);
    nb::class_<Window>(m, "Window", "The planes and the bytes of each row that move.")
        .def(nb::init<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>(), "first_plane"_a, "num_planes"_a,
             "row_offset"_a, "row_bytes"_a);
    nb::class_<Extents>(m, "Extents", "The runs of memory of a list of blocks, in canonical order; does not own them.")
        .def_prop_ro("num_blocks", &Extents::num_blocks)
        .def_prop_ro("num_runs", &Extents::num_runs)
        .def_prop_ro("num_coalesced", &Extents::num_coalesced)
        .def(
            "read_runs",
            [](const Extents& self, const Words& out) {
                if (out.size() != 2 * self.num_runs()) throw Error(Code::kConfig, "each run needs two places: address and bytes");
                std::uint64_t* at = out.data();
                for (const Run& run : self.runs()) *at++ = run.address, *at++ = run.nbytes;
            },
            "out"_a, "Address and bytes of each run, one after the other.")
        .def_prop_ro("block_bytes", &Extents::block_bytes)
        .def_prop_ro("nbytes", &Extents::nbytes);
    nb::class_<Tiers>(m, "Tiers", "The grids of one instance by tier.")
        .def(nb::init<const std::vector<std::uint8_t>&, const std::vector<Grid>&>(), "names"_a, "grids"_a)
        .def(
            "extents",
            [](const Tiers& self, const Array<const std::uint8_t>& tiers, const Array<const std::int32_t>& slots,
               const std::vector<Window>& windows) { return self.extents(view(tiers), view(slots), windows); },
            "tiers"_a, "slots"_a, "windows"_a = std::vector<Window>{});
}

}  // namespace

void register_copy(nb::module_& m) {
    register_extents(m);
    nb::class_<Abort>(m, "Abort", "Ends a copy or a pull from another thread.")
        .def(nb::init<>())
        .def("set", &Abort::set)
        .def_prop_ro("is_set", &Abort::is_set);
    nb::enum_<Outcome>(m, "Outcome")
        .value("DONE", Outcome::kDone)
        .value("REVOKED", Outcome::kRevoked)
        .value("ABORTED", Outcome::kAborted);
    m.def(
        "copy_blocks",
        [](const Extents& from, const Extents& to, std::size_t first, std::size_t count, unsigned threads,
           const ConstWords& words, std::size_t index, std::uint64_t lease, const Abort& abort, const std::optional<Words>& hashes) {
            check_index(words.size(), index);
            const Guard guard{reinterpret_cast<const std::atomic<std::uint64_t>*>(words.data() + index), lease, &abort};
            std::uint64_t* const out = hashes_of(hashes, count);
            const nb::gil_scoped_release nogil;
            return copy_blocks(from, to, first, count, threads, guard, out);
        },
        "source"_a, "target"_a, "first"_a, "count"_a, "threads"_a, "words"_a, "index"_a, "lease"_a, "abort"_a,
        "hashes"_a.none() = nb::none(), "Copy blocks while words[index] holds `lease`.");
    m.def(
        "hash_blocks",
        [](const Extents& extents, std::size_t first, unsigned threads, const Words& hashes) {
            const nb::gil_scoped_release nogil;
            hash_blocks(extents, first, hashes.size(), threads, hashes.data());
        },
        "extents"_a, "first"_a, "threads"_a, "hashes"_a, "XXH3-64 of each block, one for each place of `hashes`.");
    m.def(
        "store_word",
        [](const Words& words, std::size_t index, std::uint64_t value) {
            check_index(words.size(), index);
            reinterpret_cast<std::atomic<std::uint64_t>*>(words.data() + index)->store(value);
        },
        "words"_a, "index"_a, "value"_a, "Store a lease word so that no later write of this process is seen before it.");
}

}  // namespace poolweave::bindings
