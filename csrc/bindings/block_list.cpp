// Binding of the list of block handles.
#include "bindings/block_list.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/operators.h>

#include <algorithm>

#include "bindings/registry.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

using Array = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint64_t as_handle(nb::handle item) {
    if (PyBool_Check(item.ptr()) || !PyIndex_Check(item.ptr())) throw nb::type_error("handles are integers");
    const nb::object number = nb::steal(PyNumber_Index(item.ptr()));
    const unsigned long long value = number.is_valid() ? PyLong_AsUnsignedLongLong(number.ptr()) : 0;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();  // negative, or more than 64 bits
    return value;
}

BlockList of(nb::iterable items, std::uint64_t owner) {
    BlockList blocks{{}, owner};
    for (nb::handle item : items) blocks.handles.push_back(as_handle(item));
    return blocks;
}

std::uint64_t get_one(const BlockList& self, Py_ssize_t index) {
    const auto size = static_cast<Py_ssize_t>(self.handles.size());
    const Py_ssize_t at = index < 0 ? index + size : index;
    if (at < 0 || at >= size) throw nb::index_error("block index out of range");
    return self.handles[static_cast<std::size_t>(at)];
}

BlockList get_part(const BlockList& self, const nb::slice& which) {
    const auto [start, stop, step, length] = which.compute(self.handles.size());
    BlockList part{{}, self.owner};
    part.handles.reserve(length);
    for (std::size_t i = 0; i < length; ++i) {
        part.handles.push_back(self.handles[static_cast<std::size_t>(start + static_cast<Py_ssize_t>(i) * step)]);
    }
    return part;
}

nb::object join(const BlockList& self, nb::object other) {
    if (!nb::isinstance<BlockList>(other)) return nb::borrow(Py_NotImplemented);
    const auto& more = nb::cast<const BlockList&>(other);
    if (self.owner != 0 && more.owner != 0 && self.owner != more.owner) throw nb::value_error("blocks of two pools cannot be joined");
    BlockList all{self.handles, self.owner != 0 ? self.owner : more.owner};
    all.handles.insert(all.handles.end(), more.handles.begin(), more.handles.end());
    return nb::cast(std::move(all));
}

nb::object equal(const BlockList& self, nb::object other) {
    if (!nb::isinstance<BlockList>(other)) return nb::borrow(Py_NotImplemented);
    const auto& more = nb::cast<const BlockList&>(other);
    const bool same_pool = self.owner == more.owner || self.owner == 0 || more.owner == 0;
    return nb::bool_(same_pool && self.handles == more.handles);
}

nb::str show(const BlockList& self) {
    std::string text = "Blocks(" + std::to_string(self.handles.size()) + ": ";
    for (std::size_t i = 0; i < std::min<std::size_t>(self.handles.size(), 6); ++i) {
        text += (i > 0 ? ", " : "") + std::to_string(self.handles[i] & 0xffffffffu) + "." + std::to_string(self.handles[i] >> 32);
    }
    return nb::str((text + (self.handles.size() > 6 ? ", ...)" : ")")).c_str());
}

}  // namespace

void register_block_list(nb::module_& m) {
    nb::class_<BlockList>(m, "Blocks",
                         "Handles of blocks in token order. A value: it owns no references, whoever was given it does.\n\n"
                         "`owner` is the epoch of the pool they came from (0: not known), so that a pool can refuse blocks of\n"
                         "another one. Indexing gives a handle, slicing and `+` give Blocks.")
        .def("__init__", [](BlockList* self, const Array& array, std::uint64_t owner) {
           new (self) BlockList{{array.data(), array.data() + array.size()}, owner};
       }, "array"_a.noconvert(), "owner"_a = 0, "A copy of a uint64 array.")
        .def_static("of", &of, "handles"_a, "owner"_a = 0,
                    nb::sig("def of(handles: collections.abc.Iterable[int], owner: int = 0) -> Blocks"),
                    "From integers. Raises TypeError for what is none, OverflowError for negative ones.")
        .def_static("empty", [] { return BlockList{}; })
        .def_prop_ro("array", [](nb::handle_t<BlockList> self) {
            auto& handles = nb::cast<BlockList&>(self).handles;
            return nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(handles.data(), {handles.size()}, self);
        }, "The handles as uint64[n], without a copy.")
        .def_ro("owner", &BlockList::owner)
        .def("__len__", [](const BlockList& self) { return self.handles.size(); })
        .def("__iter__", [](const BlockList& self) {
            nb::list items;
            for (const std::uint64_t handle : self.handles) items.append(handle);
            return nb::iter(items);
        }, nb::sig("def __iter__(self) -> collections.abc.Iterator[int]"))
        .def("__getitem__", &get_one, "index"_a)
        .def("__getitem__", &get_part, "index"_a)
        .def("__add__", &join, "other"_a, nb::is_operator(), nb::sig("def __add__(self, other: Blocks) -> Blocks"))
        .def("__eq__", &equal, "other"_a, nb::is_operator(), nb::sig("def __eq__(self, other: object) -> bool"))
        .def("__hash__", [](const BlockList&) -> std::int64_t { throw nb::type_error("Blocks are not hashable"); })
        .def("__repr__", &show);
}

}  // namespace poolweave::bindings
