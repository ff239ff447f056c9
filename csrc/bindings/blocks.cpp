// BlockTable for Python: batches of handles cross as uint64 arrays, results are written into arrays of the caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/block_list.hpp"
#include "bindings/registry.hpp"
#include "core/block_table.hpp"
#include "core/error.hpp"
#include "core/swap.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> in(const In<T>& array) { return {array.data(), array.size()}; }

template <typename T>
std::span<T> out(const Out<T>& array, std::size_t size) {
    if (array.size() != size) throw Error(Code::kConfig, "an output array has another length than the handles");
    return {array.data(), array.size()};
}

// Batches of this size and more take over about 20 us: others may run meanwhile.
class ReleaseIfLong {
  public:
    explicit ReleaseIfLong(std::size_t n) {
        if (n >= 1024) release_.emplace();
    }

  private:
    std::optional<nb::gil_scoped_release> release_;
};

template <auto Method>
auto on_handles(BlockTable& table, In<std::uint64_t> handles) {
    const ReleaseIfLong release(handles.size());
    return (table.*Method)(in(handles));
}

void register_mirrors(nb::class_<BlockTable>& cls) {
    cls.def("begin_mirrors", [](BlockTable& table, In<std::uint64_t> handles, Out<std::uint64_t> chosen, Out<std::int32_t> from,
                                Out<std::int32_t> to) {
           const std::size_t n = handles.size();
           return table.begin_mirrors(in(handles), out(chosen, n), out(from, n), out(to, n));
       }, "handles"_a, "chosen"_a, "slots"_a, "to"_a, "-> how many of them get a second copy.")
        .def("end_mirrors", [](BlockTable& table, In<std::uint64_t> chosen, In<std::int32_t> to, bool commit) {
            if (to.size() != chosen.size()) throw Error(Code::kConfig, "a move's arrays differ in length");
            return table.end_mirrors(in(chosen), in(to), commit);
        }, "chosen"_a, "to"_a, "commit"_a)
        .def("demote_mirrored", &on_handles<&BlockTable::demote_mirrored>, "handles"_a, "-> those that have no mirror.")
        .def("drop_mirrors", &BlockTable::drop_mirrors, "count"_a, "from_slot"_a = 0, "tenant"_a = 0);
}

void register_guests(nb::class_<BlockTable>& cls) {
    cls.attr("GUESTS") = nb::int_(kGuests);
    cls.def("set_guests", &BlockTable::set_guests, "base"_a, "count"_a, "Guests may lie at slots [base, base + count).")
        .def("adopt", [](BlockTable& table, In<std::int32_t> slots, Out<std::uint64_t> handles, Out<std::uint8_t> fresh) {
            return table.adopt(in(slots), out(handles, slots.size()), out(fresh, slots.size()));
        }, "slots"_a, "out"_a, "fresh"_a, "Blocks where guests were taken, one reference each. -> how many, from the first on.")
        .def("take_departed", [](BlockTable& table) { return table.take_departed(); }, "Slots that guests have left since the last call.")
        .def_prop_ro("has_departed", &BlockTable::has_departed);
}

void register_tenants(nb::class_<BlockTable>& cls) {
    cls.def("set_tenants", &BlockTable::set_tenants, "count"_a)
        .def("set_quota", [](BlockTable& table, TenantId tenant, std::uint64_t hbm, std::uint64_t dram, std::uint64_t blocks) {
            table.set_quota(tenant, {hbm, dram, TenantCounts::kNoLimit}, blocks);
        }, "tenant"_a, "hbm"_a, "dram"_a, "blocks"_a, "Limits in slots; 2**64 - 1 is none.")
        .def("tenant", &BlockTable::tenant, "tenant"_a)
        .def("alloc_room", &BlockTable::alloc_room, "mask"_a, "tenant"_a = 0, "How many blocks alloc() could give now.")
        .def("tenant_room", &BlockTable::tenant_room, "tenant"_a, "mask"_a, "How many more blocks it may have in these tiers.")
        .def("tenants_of", [](const BlockTable& table, In<std::uint64_t> handles, Out<TenantId> tenants) {
            table.tenants_of(in(handles), out(tenants, handles.size()));
        }, "handles"_a, "out"_a)
        .def("fit_quotas", [](const BlockTable& table, In<std::uint64_t> handles, unsigned tier, Out<std::uint8_t> fits) {
            table.fit_quotas(in(handles), tier, out(fits, handles.size()));
        }, "handles"_a, "tier"_a, "out"_a, "1 for each block that its tenant's limits let lie in the tier, taken in order.");
}

}  // namespace

void register_blocks(nb::module_& m) {
    using Table = BlockTable;
    using U64 = In<std::uint64_t>;

    register_block_list(m);
    nb::class_<Evictable>(m, "EvictFilter", "Which payloads an index may give up.");
    nb::class_<EvictableBlocks, Evictable>(m, "EvictableBlocks");

    nb::class_<TierCounts>(m, "TierCounts", "Slots of one tier.")
        .def_ro("limit", &TierCounts::limit)
        .def_ro("free", &TierCounts::free)
        .def_ro("used", &TierCounts::used)
        .def_ro("historical", &TierCounts::historical)
        .def_ro("pinned", &TierCounts::pinned)
        .def_ro("leased", &TierCounts::leased)
        .def_ro("limbo", &TierCounts::limbo)
        .def_ro("reserved", &TierCounts::reserved)
        .def_ro("overhang", &TierCounts::overhang)
        .def_ro("mirrors", &TierCounts::mirrors);

    nb::class_<TenantCounts>(m, "TenantCounts", "Slots of one tenant, and its limits, by tier.")
        .def_ro("used", &TenantCounts::used)
        .def_ro("historical", &TenantCounts::historical)
        .def_ro("limit", &TenantCounts::limit)
        .def_ro("blocks", &TenantCounts::blocks)
        .def_ro("block_limit", &TenantCounts::block_limit);

    nb::class_<Table> cls(m, "BlockTable", "References, places and states of blocks; each call is atomic over its batch.");
    cls.attr("SEALED") = nb::int_(Table::kSealed);
    cls.attr("INDEXED") = nb::int_(Table::kIndexed);
    cls.attr("PRIVATE") = nb::int_(Table::kPrivate);
    cls.def("__init__", [](Table* self, std::uint32_t hbm, std::uint32_t dram, std::uint64_t epoch, std::uint32_t num_layers) {
           new (self) Table({hbm, dram}, epoch, num_layers);
       }, "hbm"_a, "dram"_a, "epoch"_a = 0, "num_layers"_a = 1)
        .def("alloc", [](Table& table, Out<std::uint64_t> handles, unsigned mask, TenantId tenant) {
            const ReleaseIfLong release(handles.size());
            return table.alloc({handles.data(), handles.size()}, mask, tenant);
        }, "out"_a, "mask"_a, "tenant"_a = 0)
        // The two calls of every step of an engine: without named arguments nanobind has a shorter way to them.
        .def("alloc_blocks", [](Table& table, std::int64_t count, unsigned mask) -> std::optional<BlockList> {
            constexpr std::int64_t kCheckedFirst = 4096;  // a size that may be a mistake must not cost memory
            if (count < 0) return std::nullopt;
            const auto n = static_cast<std::size_t>(count);
            if (count > kCheckedFirst && n > table.counts(0).limit + table.counts(1).limit) return std::nullopt;
            BlockList blocks{std::vector<std::uint64_t>(n), table.epoch()};
            const ReleaseIfLong release(n);
            if (!table.alloc(blocks.handles, mask, 0)) return std::nullopt;
            return blocks;
        }, "(num_blocks, mask): alloc() as Blocks; None when there are too few, or num_blocks is negative.")
        .def("free_blocks", [](Table& table, const BlockList& blocks) {
            if (blocks.owner != 0 && blocks.owner != table.epoch()) {
                throw Error(Code::kUnknownBlock, "these blocks are another pool's; send them with transfer()");
            }
            const ReleaseIfLong release(blocks.handles.size());
            return table.free(blocks.handles);
        }, "(blocks): free() of Blocks; throws kUnknownBlock for those of another table.")
        .def("free", &on_handles<&Table::free>, "handles"_a)
        .def("retain", &on_handles<&Table::retain>, "handles"_a)
        .def("seal", &on_handles<&Table::seal>, "handles"_a)
        .def("seal_layers", [](Table& table, U64 handles, std::uint32_t first, std::uint32_t last) {
            const ReleaseIfLong release(handles.size());
            table.seal_layers(in(handles), first, last);
        }, "handles"_a, "first"_a, "last"_a)
        .def("sealed_layers", [](const Table& table, U64 handles, Out<std::uint16_t> layers) {
            table.sealed_layers(in(handles), out(layers, handles.size()));
        }, "handles"_a, "out"_a, "How many layers of each are sealed, from the first on.")
        .def("set_private", &on_handles<&Table::set_private>, "handles"_a)
        .def("check_insertable", &on_handles<&Table::check_insertable>, "handles"_a)
        .def("index", &on_handles<&Table::index>, "handles"_a)
        .def("unindex", &on_handles<&Table::unindex>, "handles"_a)
        .def("lend", [](Table& table, U64 handles, Out<std::uint8_t> tiers, Out<std::int32_t> slots, bool unsealed, std::uint8_t base) {
            const std::span<std::uint8_t> names = out(tiers, handles.size());
            table.lend(in(handles), {names, out(slots, handles.size())}, unsealed);
            for (std::uint8_t& name : names) name = static_cast<std::uint8_t>(name + base);
        }, "handles"_a, "tiers"_a, "slots"_a, "unsealed"_a = false, "base"_a = 0,
             "Tiers are given by their numbers plus `base`: numpy takes ten times as long to add that.")
        .def("give_back", [](Table& table, U64 handles, In<std::uint8_t> tiers, In<std::int32_t> slots, std::uint8_t base) {
            if (tiers.size() != handles.size() || slots.size() != handles.size()) throw Error(Code::kConfig, "a loan's arrays differ in length");
            if (base == 0) return table.give_back(in(handles), in(tiers), in(slots));
            std::vector<std::uint8_t> numbers(tiers.data(), tiers.data() + tiers.size());
            for (std::uint8_t& number : numbers) number = static_cast<std::uint8_t>(number - base);
            return table.give_back(in(handles), numbers, in(slots));
        }, "handles"_a, "tiers"_a, "slots"_a, "base"_a = 0)
        .def("locate", [](const Table& table, U64 handles, Out<std::uint8_t> tiers, Out<std::int32_t> slots) {
            table.locate(in(handles), {out(tiers, handles.size()), out(slots, handles.size())});
        }, "handles"_a, "tiers"_a, "slots"_a)
        .def("slots", [](const Table& table, U64 handles, unsigned tier, Out<std::int32_t> slots) {
            table.slots(in(handles), tier, out(slots, handles.size()));
        }, "handles"_a, "tier"_a, "out"_a)
        .def("flags", [](const Table& table, U64 handles, Out<std::uint8_t> flags) {
            table.flags(in(handles), out(flags, handles.size()));
        }, "handles"_a, "out"_a)
        .def("begin_move", [](Table& table, U64 handles, unsigned tier, Out<std::uint8_t> tiers, Out<std::int32_t> from, Out<std::int32_t> to) {
            const std::size_t n = handles.size();
            return table.begin_move(in(handles), tier, {out(tiers, n), out(from, n)}, out(to, n));
        }, "handles"_a, "tier"_a, "tiers"_a, "slots"_a, "to"_a)
        .def("commit_move", [](Table& table, U64 handles, unsigned tier, In<std::int32_t> to) {
            if (to.size() != handles.size()) throw Error(Code::kConfig, "a move's arrays differ in length");
            return table.commit_move(in(handles), tier, in(to));
        }, "handles"_a, "tier"_a, "to"_a)
        .def("abort_move", [](Table& table, U64 handles, unsigned tier, In<std::int32_t> to) {
            if (to.size() != handles.size()) throw Error(Code::kConfig, "a move's arrays differ in length");
            return table.abort_move(in(handles), tier, in(to));
        }, "handles"_a, "tier"_a, "to"_a)
        .def("set_limit", &Table::set_limit, "tier"_a, "limit"_a)
        .def("evictable_overhang", &Table::evictable_overhang, "tier"_a)
        .def("overhang", &Table::overhang, "tier"_a)
        .def("used_end", &Table::used_end, "tier"_a)
        .def("counts", &Table::counts, "tier"_a)
        .def("longest_free_run", &Table::longest_free_run, "tier"_a)
        .def_prop_ro("num_live", &Table::num_live)
        .def("evictable", [](std::shared_ptr<Table> table, unsigned mask) { return std::make_shared<EvictableBlocks>(std::move(table), mask); }, "mask"_a,
             "The blocks in these tiers that only the index refers to, as a filter for the index.")
        .def("is_evictable", &Table::is_evictable, "handle"_a, "mask"_a)
        .def("check", &Table::check, nb::call_guard<nb::gil_scoped_release>());

    register_tenants(cls);
    register_guests(cls);
    register_mirrors(cls);

    nb::class_<TierGeometry>(m, "TierGeometry", "Where the planes of a tier's blocks lie.")
        .def("__init__", [](TierGeometry* self, std::uintptr_t base, std::uint64_t slot_stride, std::uint64_t plane_stride) {
            new (self) TierGeometry{reinterpret_cast<std::byte*>(base), slot_stride, plane_stride};
        }, "base"_a, "slot_stride"_a, "plane_stride"_a);
    m.def("swap_blocks", [](const TierGeometry& from, const TierGeometry& to, In<std::int32_t> from_slots, In<std::int32_t> to_slots,
                            std::uint64_t num_planes, std::uint64_t plane_bytes, unsigned threads) {
        if (from_slots.size() != to_slots.size()) throw Error(Code::kConfig, "a move's arrays differ in length");
        const nb::gil_scoped_release release;
        swap_blocks(from, to, in(from_slots), in(to_slots), num_planes, plane_bytes, threads);
    }, "source"_a, "target"_a, "from_slots"_a, "to_slots"_a, "num_planes"_a, "plane_bytes"_a, "threads"_a);
    m.def("swap_planes", [](const std::vector<TierGeometry>& from, const std::vector<TierGeometry>& to, In<std::int32_t> from_slots,
                            In<std::int32_t> to_slots, std::uint64_t plane_bytes, unsigned threads) {
        if (from_slots.size() != to_slots.size() || from.size() != to.size()) throw Error(Code::kConfig, "a move's arrays differ in length");
        const nb::gil_scoped_release release;
        swap_planes(from, to, in(from_slots), in(to_slots), plane_bytes, threads);
    }, "sources"_a, "targets"_a, "from_slots"_a, "to_slots"_a, "plane_bytes"_a, "threads"_a);
}

}  // namespace poolweave::bindings
