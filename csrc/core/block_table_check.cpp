// The invariants of a block table, proved by walking all of it.
#include <stdexcept>
#include <string>
#include <vector>

#include "core/block_table.hpp"

namespace poolweave {
namespace {

void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("block table: ") + what);
}

}  // namespace

void BlockTable::check() const {
    const std::lock_guard lock(mutex_);
    std::uint64_t live = 0;
    std::uint64_t loans = 0;
    std::uint64_t lent = 0;
    std::uint64_t moving = 0;
    std::uint64_t reserved = 0;
    for (std::uint32_t id = 0; id < fresh_; ++id) {
        const Block& b = blocks_[id];
        require(b.generation != 0, "a generation is 0");
        require((b.flags & kMarked) == 0, "a mark was left");
        require((b.flags & kSealed) != 0 || layers_of(id) < num_layers_, "all layers are sealed, the block is not");
        require(id >= mirrors_.size() || mirrors_[id] == kNobody || is_mirror(kMirrorTier, mirrors_[id]), "a mirror is another's");
        require(b.refs > 0 || layers_of(id) == 0, "a free block has sealed layers");
        if (b.refs == 0) continue;
        const std::uint32_t others = b.loans + ((b.flags & kIndexed) != 0) + ((b.flags & kMoving) != 0);
        require(b.refs >= others, "fewer references than the index, loans and moves hold");
        require((b.flags & kIndexed) == 0 || (b.flags & kSealed) != 0, "an indexed block is not sealed");
        require(tier_of(b) < kTiers && slot_of(b) < stores_[tier_of(b)].slots.size(), "a block lies nowhere");
        require(stores_[tier_of(b)].slots[slot_of(b)].owner == id, "a block's slot is not its own");
        ++live;
        loans += b.loans;
        moving += (b.flags & kMoving) != 0;
    }
    require(live == live_, "live blocks are counted wrong");
    std::uint64_t freed = 0;
    for (std::uint32_t id = free_ids_; id != kNobody; id = blocks_[id].place, ++freed) {
        require(id < fresh_ && blocks_[id].refs == 0 && freed < fresh_, "the list of free ids is broken");
    }
    require(freed + live == fresh_, "an id is lost");
    for (unsigned tier = 0; tier < kTiers; ++tier) {
        check_slots(tier);
        reserved += stores_[tier].counts.reserved;
        for (const Slot& slot : stores_[tier].slots) lent += slot.loans;
    }
    require(loans == lent, "blocks and places count different loans");
    require(moving == reserved, "moves and their targets differ");
    check_tenants();
}

void BlockTable::check_tenants() const {
    std::vector<TenantCounts> seen(tenants_.size());
    for (unsigned tier = 0; tier < kTiers && !tenants_.empty(); ++tier) {
        const Store& store = stores_[tier];
        require(store.tenants.size() == store.slots.size(), "slots without a tenant");
        for (std::uint32_t slot = 0; slot < store.slots.size(); ++slot) {
            const std::uint32_t owner = store.slots[slot].owner;
            const TenantId tenant = store.tenants[slot];
            require(tenant < tenants_.size() && (tenant == 0 || owner != kNobody), "a free slot is a tenant's");
            ++seen[tenant].used[tier];
            if (owner >= kReserved || is_mirror(tier, slot)) continue;
            ++seen[tenant].blocks;
            seen[tenant].historical[tier] += (blocks_[owner].flags & kIndexed) != 0 && blocks_[owner].refs == 1;
        }
    }
    for (std::size_t tenant = 1; tenant < tenants_.size(); ++tenant) {
        const TenantCounts& counts = tenants_[tenant];
        require(counts.used == seen[tenant].used && counts.blocks == seen[tenant].blocks, "a tenant's slots are counted wrong");
        require(counts.historical == seen[tenant].historical, "a tenant's history is counted wrong");
    }
}

void BlockTable::check_slots(unsigned tier) const {
    const Store& store = stores_[tier];
    TierCounts seen;
    seen.limit = store.counts.limit;
    for (std::uint32_t slot = 0; slot < store.slots.size(); ++slot) {
        const Slot& s = store.slots[slot];
        const bool occupied = s.owner != kNobody;
        require(store.free.contains(slot) == (!occupied && slot < seen.limit), "the free set is wrong");
        require(occupied || s.loans == 0, "a free slot is on loan");
        seen.free += store.free.contains(slot);
        seen.used += occupied;
        seen.overhang += occupied && slot >= seen.limit;
        seen.leased += s.loans > 0;
        seen.limbo += s.owner == kLimbo;
        require(s.owner != kLimbo || s.loans > 0, "a limbo slot is on no loan");
        seen.reserved += s.owner == kReserved;
        if (s.owner >= kReserved) continue;
        require(s.owner < fresh_, "a slot's owner cannot be");
        const Block& b = blocks_[s.owner];
        if (is_mirror(tier, slot)) {
            require(b.refs > 0 && tier_of(b) == 0 && (b.flags & kSealed) != 0, "a mirror of what cannot have one");
            require(slot < mirrors_end_, "a mirror lies above the last");
            ++seen.mirrors;
            continue;
        }
        require(b.refs > 0 && tier_of(b) == tier && slot_of(b) == slot, "a slot's owner lies elsewhere");
        if ((b.flags & kIndexed) != 0) ++(b.refs == 1 ? seen.historical : seen.pinned);
    }
    const TierCounts& c = store.counts;
    require(seen.free == store.free.count() && seen.used == c.used && seen.overhang == c.overhang, "slots are counted wrong");
    require(seen.mirrors == c.mirrors, "mirrors are counted wrong");
    require(seen.historical == c.historical && seen.pinned == c.pinned, "references are counted wrong");
    require(seen.leased == c.leased && seen.limbo == c.limbo && seen.reserved == c.reserved, "places are counted wrong");
}

}  // namespace poolweave
