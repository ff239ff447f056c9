// Binding of intakes: small offers out of a peer's mapped memory. See csrc/core/{intake,offer_frame}.hpp.
#include "core/intake.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <optional>

#include "bindings/array_arg.hpp"
#include "bindings/catalogue_pair.hpp"
#include "bindings/radix_results.hpp"
#include "bindings/registry.hpp"
#include "core/offer_frame.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

// An intake with what it borrows.
struct HeldIntake {
    HeldIntake(nb::object held_pair, nb::object held_ours, nb::object held_theirs, nb::handle held_words)
        : pair(held_pair), ours(held_ours), theirs(held_theirs), words(held_words),
          intake(nb::cast<Pair&>(pair).catalogue, nb::cast<Tiers&>(ours), nb::cast<Tiers&>(theirs), words.span()) {}

    nb::object pair, ours, theirs;
    PayloadsArg words;
    Intake intake;
};

template <class T>
std::span<const T> items(const nb::bytes& bytes) {
    return {reinterpret_cast<const T*>(bytes.c_str()), bytes.size() / sizeof(T)};
}

nb::object take(HeldIntake& self, const nb::bytes& tokens, std::uint32_t ns, std::size_t num_whole, unsigned mask,
                std::uint64_t number, const nb::bytes& tiers, const nb::bytes& slots, const nb::bytes& checksums, bool keep, bool release) {
    auto& pair = nb::cast<Pair&>(self.pair);
    const SmallOffer offer{{items<std::int32_t>(tokens), ns, tiers.size(), mask, 0}, num_whole, number,
                           items<std::uint8_t>(tiers), items<std::int32_t>(slots), items<std::uint64_t>(checksums)};
    if (offer.slots.size() != tiers.size() || (checksums.size() != 0 && offer.checksums.size() != tiers.size()) ||
        num_whole > tiers.size()) {
        throw nb::value_error("places, checksums and blocks differ in number");
    }
    TakenIn taken = without_gil(release || !pair.tree.idle(), [&] {
        TakenIn all = self.intake.take(offer);
        if (all.done && !keep) all.available = pair.catalogue.release(all.blocks);
        return all;
    });
    nb::object blocks = taken.done && keep ? to_array(std::move(taken.blocks)) : nb::none();
    return nb::make_tuple(taken.done, taken.available, taken.num_held, taken.num_calls, blocks);
}

// An offer right out of its message. None: it is not for this way, or of another identity than `identity`.
nb::object take_message(HeldIntake& self, const nb::bytes& message, const nb::bytes& identity, std::uint32_t ns,
                        std::size_t block_tokens, std::size_t most_blocks, std::size_t most_held) {
    const std::optional<OfferFrame> read = read_offer({message.c_str(), message.size()}, most_blocks);
    if (!read || read->identity != std::string_view(identity.c_str(), identity.size())) return nb::none();
    auto& pair = nb::cast<Pair&>(self.pair);
    const SmallOffer offer{{read->tokens, ns, read->num_blocks, read->mask, 0}, std::min(read->num_blocks, read->tokens.size() / block_tokens),
                           read->number, read->tiers, read->slots, read->checksums};
    const TakenIn taken = without_gil(read->num_blocks > most_held || !pair.tree.idle(), [&] {
        TakenIn all = self.intake.take(offer);
        if (all.done) all.available = pair.catalogue.release(all.blocks);
        return all;
    });
    return nb::make_tuple(taken.done, taken.available, read->num_blocks - taken.num_held, taken.num_calls, read->number);
}

}  // namespace

void register_intake(nb::module_& m) {
    nb::class_<HeldIntake>(m, "Intake", "Takes small offers in out of a peer's mapped memory. The caller holds the pool's lock.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::handle>(), "catalogue"_a, "ours"_a, "theirs"_a, "words"_a,
             nb::sig("def __init__(self, catalogue: BlockCatalogue, ours: Tiers, theirs: Tiers, words: NDArray[numpy.uint64]) -> None"))
        .def("take", &take, "tokens"_a, "ns"_a, "num_whole"_a, "mask"_a, "number"_a, "tiers"_a, "slots"_a, "checksums"_a, "keep"_a,
             "release"_a,
             nb::sig("def take(self, tokens: bytes, ns: int, num_whole: int, mask: int, number: int, tiers: bytes, slots: bytes, "
                     "checksums: bytes, keep: bool, release: bool) -> tuple[bool, int, int, int, NDArray[numpy.uint64] | None]"),
             "(done, available, num_held, num_calls, blocks): match, pin, allocate, copy while the word of `number` stands,\n"
             "check, seal and index. Not done: nothing is left of it. `keep`: the blocks, with the caller's references,\n"
             "else none are left. `available` blocks became free or evictable. `release` lets others have the GIL.")
        .def("take_message", &take_message, "message"_a, "identity"_a, "ns"_a, "block_tokens"_a, "most_blocks"_a, "most_held"_a,
             nb::sig("def take_message(self, message: bytes, identity: bytes, ns: int, block_tokens: int, most_blocks: int, "
                     "most_held: int) -> tuple[bool, int, int, int, int] | None"),
             "(done, available, num_pulled, num_calls, number) of an offer without a tag, as take() of it read out of its\n"
             "message; None for any other message, or another identity. Over `most_held` blocks others have the GIL.");
}

}  // namespace poolweave::bindings
