// Mirrors: second copies in the lower tier of blocks that are never written again, so that giving up the upper copy costs
// nothing. A mirror is no place of its block: nobody reads it until demote_mirrored() makes it one.
#include <algorithm>

#include "core/block_table.hpp"
#include "core/error.hpp"

namespace poolweave {

std::size_t BlockTable::begin_mirrors(Handles handles, std::span<std::uint64_t> chosen, std::span<std::int32_t> from,
                                      std::span<std::int32_t> to) {
    const std::lock_guard lock(mutex_);
    Store& store = stores_[kMirrorTier];
    std::size_t n = 0;
    for (std::size_t i = 0; i < handles.size() && store.room() > 0; ++i) {
        if (!can_mirror(handles[i])) continue;
        Block& b = blocks_[id_of(handles[i])];
        store.free.take_lowest(1, &to[n]);
        ++store.counts.used;
        ++store.counts.reserved;
        store.slots[to[n]].owner = kReserved;
        if (!tenants_.empty()) {
            store.tenants[to[n]] = stores_[0].tenants[slot_of(b)];
            if (TenantCounts* tenant = tenant_at(kMirrorTier, static_cast<std::uint32_t>(to[n]))) ++tenant->used[kMirrorTier];
        }
        from[n] = static_cast<std::int32_t>(slot_of(b));
        chosen[n++] = handles[i];
        add_ref(b);
        b.flags |= kMoving;  // also: not again in this call
    }
    return n;
}

std::size_t BlockTable::end_mirrors(Handles chosen, std::span<const std::int32_t> to, bool commit) {
    const std::lock_guard lock(mutex_);
    Store& store = stores_[kMirrorTier];
    plain_ = false;
    if (mirrors_.empty()) mirrors_.resize(blocks_.size(), kNobody);
    store.counts.reserved -= chosen.size();
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        const std::uint32_t id = id_of(chosen[i]);
        const auto slot = static_cast<std::uint32_t>(to[i]);
        if (commit) {
            store.slots[slot].owner = id;
            mirrors_[id] = slot;
            mirrors_end_ = std::max(mirrors_end_, slot + 1);
            ++store.counts.mirrors;
        } else {
            release_slot(kMirrorTier, slot);
        }
        blocks_[id].flags = static_cast<std::uint8_t>(blocks_[id].flags & ~kMoving);
        drop_ref(blocks_[id]);
    }
    return settle(chosen);
}

std::vector<std::uint64_t> BlockTable::demote_mirrored(Handles handles) {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> rest;
    for (const std::uint64_t handle : handles) (void)get(handle);
    for (const std::uint64_t handle : handles) {
        const std::uint32_t id = id_of(handle);
        Block& b = blocks_[id];
        if (id >= mirrors_.size() || mirrors_[id] == kNobody || (b.flags & kMoving) != 0) {
            rest.push_back(handle);
            continue;
        }
        const std::uint32_t slot = mirrors_[id];
        mirrors_[id] = kNobody;
        --stores_[kMirrorTier].counts.mirrors;
        tally(b, -1ull);
        release_slot(tier_of(b), slot_of(b));
        b.place = kMirrorTier << 30 | slot;
        tally(b, 1);
    }
    return rest;
}

std::size_t BlockTable::drop_mirrors(std::size_t count, std::uint32_t from_slot, TenantId tenant) {
    const std::lock_guard lock(mutex_);
    const Store& store = stores_[kMirrorTier];
    std::size_t dropped = 0;
    for (std::uint32_t slot = mirrors_end_; slot-- > from_slot && dropped < count && store.counts.mirrors > 0;) {
        if (is_mirror(kMirrorTier, slot) && (tenant == 0 || store.tenants[slot] == tenant)) {
            drop_mirror(store.slots[slot].owner);
            ++dropped;
        }
        if (slot + 1 == mirrors_end_ && !is_mirror(kMirrorTier, slot)) mirrors_end_ = slot;
    }
    return dropped;
}

// A live sealed block of the upper tier that has no mirror, is not being moved, and whose tenant may have one.
bool BlockTable::can_mirror(std::uint64_t handle) const noexcept {
    const std::uint32_t id = id_of(handle);
    if (id >= fresh_ || blocks_[id].generation != handle >> 32 || blocks_[id].refs == 0) return false;
    const Block& b = blocks_[id];
    const bool fit = (b.flags & kSealed) != 0 && (b.flags & kMoving) == 0 && tier_of(b) == 0;
    if (!fit || (id < mirrors_.size() && mirrors_[id] != kNobody)) return false;
    return tenants_.empty() || room_locked(stores_[0].tenants[slot_of(b)], kMirrorTier) > 0;
}

bool BlockTable::is_mirror(unsigned tier, std::uint32_t slot) const noexcept {
    const std::uint32_t owner = stores_[tier].slots[slot].owner;
    return tier == kMirrorTier && owner < mirrors_.size() && mirrors_[owner] == slot;
}

void BlockTable::drop_mirror(std::uint32_t id) {
    if (id >= mirrors_.size() || mirrors_[id] == kNobody) return;
    const std::uint32_t slot = mirrors_[id];
    mirrors_[id] = kNobody;
    --stores_[kMirrorTier].counts.mirrors;
    release_slot(kMirrorTier, slot);
}

}  // namespace poolweave
