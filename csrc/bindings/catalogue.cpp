// Binding of the catalogue: the index and the table in step. See csrc/core/catalogue.hpp.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <optional>

#include "bindings/array_arg.hpp"
#include "bindings/catalogue_pair.hpp"
#include "bindings/radix_results.hpp"
#include "bindings/registry.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Tokens, or none.
class MaybeTokens {
  public:
    explicit MaybeTokens(nb::handle array) {
        if (!array.is_none()) arg_.emplace(array);
    }
    Tokens span() const noexcept { return arg_ ? arg_->span() : Tokens{}; }

  private:
    std::optional<TokensArg> arg_;
};

MatchResult match(Pair& self, nb::handle array, std::uint32_t ns) {
    const TokensArg tokens(array);
    return {self.run(tokens.span(), [&] { return self.catalogue.match(tokens.span(), ns); }), nb::object()};
}

Inserted insert(Pair& self, nb::handle array, nb::handle handles, std::uint32_t ns) {
    const TokensArg tokens(array);
    const PayloadsArg blocks(handles);
    return self.run(tokens.span(), [&] { return self.catalogue.insert(tokens.span(), blocks.span(), ns); });
}

// Writes the handles of held and fresh blocks, and the places of the fresh ones, into arrays of the caller: making an
// array here takes ten times as long.
nb::object place(Pair& self, nb::handle array, std::uint32_t ns, unsigned mask, TenantId tenant, Out<std::uint64_t> handles,
                 Out<std::uint8_t> tiers, Out<std::int32_t> slots) {
    const MaybeTokens tokens(array);
    const std::size_t num_blocks = handles.size();
    if (tiers.size() != num_blocks || slots.size() != num_blocks) throw nb::value_error("places for another number of blocks");
    const Placed placed = self.run(tokens.span(), [&] {
        return self.catalogue.place({tokens.span(), ns, num_blocks, mask, tenant});
    });
    std::ranges::copy(placed.fresh, std::ranges::copy(placed.held, handles.data()).out);
    std::ranges::transform(placed.tiers, tiers.data(), [](std::uint8_t number) { return static_cast<std::uint8_t>(number + 1); });
    std::ranges::copy(placed.slots, slots.data());
    return nb::make_tuple(placed.held.size(), placed.held.size() + placed.fresh.size() == num_blocks);
}

Inserted commit(Pair& self, nb::handle held, nb::handle fresh, std::size_t num_whole, nb::handle array, std::uint32_t ns,
                bool is_private) {
    const PayloadsArg here(held), came(fresh);
    const MaybeTokens tokens(array);
    if (num_whole > here.span().size() + came.span().size()) throw nb::value_error("more full blocks than blocks");
    return self.run(tokens.span(), [&] {
        return self.catalogue.commit({here.span(), came.span(), num_whole, tokens.span(), ns, is_private});
    });
}

}  // namespace

void register_catalogue(nb::module_& m) {
    nb::class_<Pair>(m, "BlockCatalogue", "An index and a table in step. The caller holds the pool's lock in every call.")
        .def("__init__", [](Pair* self, std::shared_ptr<BlockTable> table, nb::object tree) {
            RadixTree& native = nb::cast<RadixTree&>(tree);
            new (self) Pair{tree, native, Catalogue(std::move(table), native)};
        }, "table"_a, "tree"_a, nb::sig("def __init__(self, table: BlockTable, tree: RadixTree) -> None"))
        .def("match", &match, "tokens"_a, "ns"_a, nb::sig("def match(self, tokens: NDArray[numpy.int32], ns: int) -> Match"),
             "The longest indexed prefix, with one reference on each block for the caller.")
        .def("insert", &insert, "tokens"_a, "blocks"_a, "ns"_a,
             nb::sig("def insert(self, tokens: NDArray[numpy.int32], blocks: NDArray[numpy.uint64], ns: int) -> Inserted"),
             "Index the whole blocks of tokens that `blocks` has; atomic.")
        .def("place", &place, "tokens"_a.none(), "ns"_a, "mask"_a, "tenant"_a, "handles"_a, "tiers"_a, "slots"_a,
             nb::sig("def place(self, tokens: NDArray[numpy.int32] | None, ns: int, mask: int, tenant: int, "
                     "handles: NDArray[numpy.uint64], tiers: NDArray[numpy.uint8], slots: NDArray[numpy.int32]) -> tuple[int, bool]"),
             "Fill `handles` with blocks that are here already and fresh ones, one reference on each for the caller, and\n"
             "the rest with the Tier values and slots of the fresh ones. Returns how many were here, and False when no\n"
             "room was found for the fresh ones: then there are none. No `mask` allocates nothing.")
        .def("commit", &commit, "held"_a, "fresh"_a, "num_whole"_a, "tokens"_a.none(), "ns"_a, "private"_a,
             nb::sig("def commit(self, held: NDArray[numpy.uint64], fresh: NDArray[numpy.uint64], num_whole: int, "
                     "tokens: NDArray[numpy.int32] | None, ns: int, private: bool) -> Inserted"),
             "They came: seal the full ones of fresh, and index all full ones by tokens, if given.");
    register_intake(m);
}

}  // namespace poolweave::bindings
