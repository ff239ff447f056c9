// Binding of a GPU: memory that an arena takes from it, buffers, streams, and copies between its memory and the host's.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <vector>

#include "bindings/registry.hpp"
#include "core/arena.hpp"
#include "core/swap.hpp"
#include "cuda/device.hpp"
#include "cuda/device_pages.hpp"
#include "cuda/registration.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

using cuda::Device;
using cuda::DeviceBuffer;
using cuda::DevicePages;
using cuda::Registration;
using Slots = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Memory of a device as an array of `bits`-wide numbers, `code` being DLPack's for their kind; strides in elements.
nb::object array_of(std::uint64_t address, int ordinal, const std::vector<std::size_t>& shape, const std::vector<std::int64_t>& strides,
                    int code, int bits, nb::handle keep) {
    const nb::dlpack::dtype dtype{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
    return nb::cast(nb::ndarray<>(reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), shape.size(), shape.data(), keep,
                                  strides.data(), dtype, nb::device::cuda::value, ordinal));
}

}  // namespace

void register_device(nb::module_& m) {
    using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

    nb::class_<Device>(m, "Device", "One GPU by its primary context.")
        .def_static("open", &Device::open, "ordinal"_a, ReleaseGil())
        .def_prop_ro("ordinal", &Device::ordinal)
        .def_prop_ro("granularity", &Device::granularity, "Bytes: page sizes are multiples of it.")
        .def_prop_ro("total_bytes", &Device::total_bytes)
        .def_prop_ro("free_bytes", &Device::free_bytes)
        .def("arena", [](std::shared_ptr<Device> device, std::uint64_t capacity, std::uint64_t budget, std::uint64_t page_bytes) {
            const std::uint64_t pages = page_bytes == 0 ? 0 : (capacity + page_bytes - 1) / page_bytes;
            return Arena::create_of(std::make_unique<DevicePages>(std::move(device), pages, page_bytes), capacity, budget, page_bytes);
        }, "capacity_bytes"_a, "budget_bytes"_a, "page_bytes"_a, ReleaseGil())
        .def("host_arena", [](std::shared_ptr<Device> device, std::uint64_t capacity, std::uint64_t budget, std::uint64_t page_bytes,
                              Want huge_pages, Want pinned) {
            return Arena::create(capacity, budget, page_bytes, {huge_pages, pinned, std::make_unique<Registration>(std::move(device), page_bytes)});
        }, "capacity_bytes"_a, "budget_bytes"_a, "page_bytes"_a, "huge_pages"_a, "pinned"_a, ReleaseGil(),
           "As Arena.create(); pinned is registered with the device, which then copies without buffers between.")
        .def("swap_blocks", [](Device& device, const TierGeometry& from, const TierGeometry& to, Slots from_slots, Slots to_slots,
                               std::uint64_t num_planes, std::uint64_t plane_bytes) {
            const nb::gil_scoped_release release;
            device.copy(plan_swap(from, to, {from_slots.data(), from_slots.size()}, {to_slots.data(), to_slots.size()}, num_planes, plane_bytes));
        }, "source"_a, "target"_a, "slots"_a, "to"_a, "num_planes"_a, "plane_bytes"_a, "As swap_blocks(), where one of them is the device's.")
        .def("gather", &Device::gather, "extents"_a, "begin"_a, "end"_a, "staged"_a, ReleaseGil(), "Bytes of blocks laid one after the other to an address.")
        .def("scatter", &Device::scatter, "extents"_a, "begin"_a, "end"_a, "staged"_a, ReleaseGil(), "Back from there.")
        .def("hash_blocks", [](Device& device, const Extents& extents, std::size_t first, Words hashes) {
            const nb::gil_scoped_release release;
            device.hash_blocks(extents, first, {hashes.data(), hashes.size()});
        }, "extents"_a, "first"_a, "hashes"_a, "As hash_blocks(), through host memory.")
        .def("make_stream", &Device::make_stream, "-> its handle, to be dropped.")
        .def("drop_stream", &Device::drop_stream, "stream"_a, ReleaseGil())
        .def("is_idle", &Device::is_idle, "stream"_a, "Whether all that was enqueued is done; raises what failed.");

    nb::class_<Device::Current>(m, "CurrentDevice", "The device's context is current on this thread while one of these lives.")
        .def(nb::init<const Device&>(), "device"_a, nb::keep_alive<1, 2>());

    nb::class_<DeviceBuffer>(m, "DeviceBuffer", "Memory of a device.")
        .def(nb::init<std::shared_ptr<Device>, std::uint64_t>(), "device"_a, "nbytes"_a, ReleaseGil())
        .def_prop_ro("address", &DeviceBuffer::address)
        .def_prop_ro("nbytes", &DeviceBuffer::nbytes);

    m.def("device_array", &array_of, "address"_a, "ordinal"_a, "shape"_a, "strides"_a, "code"_a, "bits"_a, "keep"_a,
          "Memory of a device for DLPack; `keep` lives as long as it does.");
}

}  // namespace poolweave::bindings
