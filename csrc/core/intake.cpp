#include "core/intake.hpp"

#include <algorithm>
#include <vector>

#include "core/copy.hpp"
#include "core/error.hpp"

namespace poolweave {

TakenIn Intake::take(const SmallOffer& offer) {
    TakenIn taken;
    try {
        const Placed placed = catalogue_.place(offer.expected);
        taken.num_held = placed.held.size();
        taken.blocks = placed.held;
        taken.blocks.insert(taken.blocks.end(), placed.fresh.begin(), placed.fresh.end());
        if (taken.blocks.size() == offer.expected.num_blocks && pull(offer, placed, taken)) {
            catalogue_.commit({placed.held, placed.fresh, offer.num_whole, offer.expected.tokens, offer.expected.ns});
            taken.done = true;
        }
    } catch (const Error&) {
        taken.done = false;  // a place outside the memory, or a token that is none: found again where it can be told of
    }
    if (!taken.done) {
        taken.available = catalogue_.release(taken.blocks);
        taken.blocks.clear();
    }
    return taken;
}

bool Intake::pull(const SmallOffer& offer, const Placed& placed, TakenIn& taken) const {
    const std::size_t held = placed.held.size(), count = placed.fresh.size();
    if (count == 0) return true;
    const Extents from = theirs_.extents(offer.tiers.subspan(held), offer.slots.subspan(held), {});
    std::vector<std::uint8_t> names(count);
    std::ranges::transform(placed.tiers, names.begin(), [](std::uint8_t tier) { return static_cast<std::uint8_t>(tier + 1); });
    const Extents to = ours_.extents(names, placed.slots, {});
    const std::atomic<std::uint64_t>& word =
        reinterpret_cast<const std::atomic<std::uint64_t>&>(words_[offer.number % words_.size()]);
    std::vector<std::uint64_t> hashes(offer.checksums.empty() ? 0 : count);
    const Guard guard{&word, offer.number, nullptr};
    if (copy_blocks(from, to, 0, count, 1, guard, hashes.empty() ? nullptr : hashes.data()) != Outcome::kDone) return false;
    taken.num_calls = to.num_coalesced();
    return hashes.empty() || std::ranges::equal(hashes, offer.checksums.subspan(held));
}

}  // namespace poolweave
