// A small offer out of mapped memory, taken in in one go: match, pin, allocate, copy, recheck, seal, index.
//
// All or nothing: what cannot be finished here leaves nothing behind, and is done again step by step by whoever called,
// who then says what is wrong with it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/catalogue.hpp"
#include "core/extents.hpp"

namespace poolweave {

struct SmallOffer {
    Expected expected;
    std::size_t num_whole = 0;  // full blocks
    std::uint64_t number = 0;   // what its lease word holds
    std::span<const std::uint8_t> tiers;  // names
    std::span<const std::int32_t> slots;
    std::span<const std::uint64_t> checksums;  // one a block, or none
};

struct TakenIn {
    PayloadList blocks;           // held and fresh, a reference on each for the caller; empty when it was not taken in
    std::size_t num_held = 0;
    std::size_t num_calls = 0;    // pieces of memory that were written
    std::size_t available = 0;    // blocks that became free or evictable again: it was not taken in
    bool done = false;
};

// Borrows all of them; tiers are named by their number + 1. As with the catalogue, the caller holds the pool's lock.
class Intake {
  public:
    Intake(Catalogue& catalogue, const Tiers& ours, const Tiers& theirs, std::span<const std::uint64_t> words)
        : catalogue_(catalogue), ours_(ours), theirs_(theirs), words_(words) {}

    TakenIn take(const SmallOffer& offer);

  private:
    bool pull(const SmallOffer& offer, const Placed& placed, TakenIn& taken) const;

    Catalogue& catalogue_;
    const Tiers& ours_;
    const Tiers& theirs_;
    std::span<const std::uint64_t> words_;
};

}  // namespace poolweave
