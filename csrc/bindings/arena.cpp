// Arena and Range for Python. Sizes are bytes, positions are pages; a buffer keeps its range alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bindings/registry.hpp"
#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/range.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

using Rows = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void register_arena(nb::module_& m) {
    using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

    nb::class_<Arena::Stats>(m, "ArenaStats", "What an arena has, in bytes.")
        .def_ro("page_bytes", &Arena::Stats::page_bytes)
        .def_ro("capacity_bytes", &Arena::Stats::capacity_bytes)
        .def_ro("budget_bytes", &Arena::Stats::budget_bytes)
        .def_ro("held_bytes", &Arena::Stats::held_bytes)
        .def_ro("kept_bytes", &Arena::Stats::kept_bytes)
        .def_ro("resident_bytes", &Arena::Stats::resident_bytes)
        .def_ro("processes", &Arena::Stats::processes)
        .def_ro("huge_pages", &Arena::Stats::huge_pages)
        .def_ro("pinned_bytes", &Arena::Stats::pinned_bytes)
        .def_ro("guest_bytes", &Arena::Stats::guest_bytes)
        .def_ro("orphan_bytes", &Arena::Stats::orphan_bytes);

    nb::enum_<Want>(m, "Want", "Whether a kind of memory is asked for.")
        .value("OFF", Want::kOff)
        .value("PREFER", Want::kPrefer)
        .value("REQUIRE", Want::kRequire);

    nb::class_<Arena>(m, "Arena", "Physical pages under a byte budget.")
        .def_static("create", [](std::uint64_t capacity, std::uint64_t budget, std::uint64_t page_bytes, Want huge_pages, Want pinned) {
            return Arena::create(capacity, budget, page_bytes, {huge_pages, pinned, nullptr});
        }, "capacity_bytes"_a, "budget_bytes"_a, "page_bytes"_a, "huge_pages"_a = Want::kOff, "pinned"_a = Want::kOff)
        .def_static("attach", &Arena::attach, "data_fd"_a, "ledger_fd"_a, "pinned"_a = Want::kOff, "Join another process's arena; both are duplicated.")
        .def("set_budget", &Arena::set_budget, "nbytes"_a, ReleaseGil())
        .def("trim", &Arena::trim, ReleaseGil(), "Return the memory of all free pages to the system. -> bytes")
        .def("reap", &Arena::reap, ReleaseGil(), "Free what dead processes held. -> bytes")
        .def("stats", &Arena::stats)
        .def("check", &Arena::check)
        .def("readonly_fd", &Arena::readonly_fd, "The memory opened read-only; the arena owns the descriptor.")
        .def_prop_ro("member", [](const Arena& arena) {
            const PageLedger::Member self = const_cast<Arena&>(arena).ledger().self();
            return std::make_tuple(self.process.pid, self.process.start_ticks, self.place);
        }, "This registration as take_guests() of others names it: (pid, start, place).")
        .def_prop_ro("id", [](Arena& arena) { return arena.ledger().id(); }, "Names the arena to its members.")
        .def("departures", [](Arena& arena) { return arena.ledger().departures(); }, "How often a page lost its last guest.")
        .def_prop_ro("data_fd", &Arena::data_fd)
        .def_prop_ro("ledger_fd", &Arena::ledger_fd)
        .def_prop_ro("page_bytes", &Arena::page_bytes);

    nb::class_<Range>(m, "Range", "Reserved address space into which an arena's pages are mapped.")
        .def(nb::init<std::shared_ptr<Arena>, std::uint64_t, bool, std::uint64_t>(), "arena"_a, "nbytes"_a, "sole"_a = false, "guest_bytes"_a = 0)
        .def("map", &Range::map, "first"_a, "count"_a, ReleaseGil())
        .def("unmap", &Range::unmap, "first"_a, "count"_a, ReleaseGil())
        .def("ensure", &Range::ensure, "first"_a, "count"_a, ReleaseGil(), "Map those of the pages that are not.")
        .def("drop", &Range::drop, "first"_a, "count"_a, ReleaseGil(), "Unmap those of the pages that are mapped.")
        .def("page_at", [](const Range& range, std::uint64_t index) -> std::int64_t {
            const std::uint32_t page = range.page_at(index);
            return page == kNoPage ? -1 : std::int64_t{page};
        }, "index"_a, "The arena page behind page `index`, or -1.")
        .def("take_guests", [](Range& range, std::tuple<std::int64_t, std::uint64_t, std::uint32_t> lender, Rows rows, std::uint64_t block_bytes,
                               std::int64_t shift, nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> table) {
            const PageLedger::Member member{{std::get<0>(lender), std::get<1>(lender)}, std::get<2>(lender)};
            const nb::gil_scoped_release release;
            return range.take_guests(member, {rows.data(), rows.size()}, block_bytes, shift, {table.data(), table.size()});
        }, "lender"_a, "rows"_a, "block_bytes"_a, "shift"_a, "table"_a, "Map blocks of another range here, read-only; False when it is gone.")
        .def("drop_guests", [](Range& range, Rows rows, std::uint64_t block_bytes) {
            const nb::gil_scoped_release release;
            range.drop_guests({rows.data(), rows.size()}, block_bytes);
        }, "rows"_a, "block_bytes"_a)
        .def("have_guests", [](Range& range, Rows rows, std::uint64_t block_bytes, nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
            if (out.size() != rows.size()) throw Error(Code::kConfig, "an output array has another length than the rows");
            range.have_guests({rows.data(), rows.size()}, block_bytes, {out.data(), out.size()});
        }, "rows"_a, "block_bytes"_a, "out"_a, "1 for each block in whose pages others read.")
        .def_prop_ro("table_fd", &Range::table_fd)
        .def("num_mapped_from", &Range::num_mapped_from, "first"_a)
        .def("check", &Range::check)
        .def("buffer", [](nb::handle_t<Range> self) {
            const Range& range = nb::cast<const Range&>(self);
            if (!range.arena()->is_host()) throw Error(Code::kConfig, "the host cannot read a device's memory");
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(range.data(), {range.nbytes()}, self);
        }, "The whole span as uint8[nbytes]; zeros where nothing is mapped.")
        .def_prop_ro("address", [](const Range& range) { return reinterpret_cast<std::uintptr_t>(range.data()); })
        .def_prop_ro("nbytes", &Range::nbytes)
        .def_prop_ro("num_pages", &Range::num_pages)
        .def_prop_ro("num_mapped", &Range::num_mapped)
        .def_prop_ro("sole", &Range::sole);
}

}  // namespace poolweave::bindings
