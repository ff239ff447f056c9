#include "core/block_table.hpp"

#include <algorithm>
#include <string>

#include "core/error.hpp"

namespace poolweave {
namespace {

constexpr std::uint32_t kMaxSlots = 1u << 30;     // what a place has bits for
constexpr std::uint32_t kMaxLoans = (1u << 24) - 1;
constexpr std::uint32_t kMaxLayers = 0xffff;

// 1 to 2^31: as many generations are left before they wrap.
std::uint32_t first_generation(std::uint64_t epoch) {
    if (epoch == 0) return 1;
    return static_cast<std::uint32_t>((epoch * 0x9E3779B97F4A7C15u) >> 33) + 1;
}

std::int64_t number(std::uint64_t value) { return static_cast<std::int64_t>(value); }

}  // namespace

BlockTable::BlockTable(std::array<std::uint32_t, kTiers> limits, std::uint64_t epoch, std::uint32_t num_layers)
    : epoch_(epoch), num_layers_(num_layers), first_generation_(first_generation(epoch)), free_ids_(kNobody) {
    if (num_layers < 1 || num_layers > kMaxLayers) {
        throw Error(Code::kConfig, "a block has 1 to 65535 layers, got " + std::to_string(num_layers), {num_layers, kMaxLayers});
    }
    for (unsigned tier = 0; tier < kTiers; ++tier) set_limit(tier, limits[tier]);
}

// --- references --------------------------------------------------------------------------------------------

// What can be given out now, by tier and in all.
std::size_t BlockTable::alloc_room_locked(unsigned mask, TenantId tenant, std::array<std::size_t, kTiers>& room) const noexcept {
    std::size_t all = 0;
    for (unsigned tier = 0; tier < kTiers; ++tier) {
        if ((mask >> tier & 1) != 0) room[tier] = std::min<std::uint64_t>(stores_[tier].room(), room_locked(tenant, tier));
        all += room[tier];
    }
    if (tenant == 0) [[likely]] return all;
    const TenantCounts& counts = tenants_[tenant];
    return std::min(all, counts.block_limit - std::min(counts.block_limit, counts.blocks));
}

bool BlockTable::alloc(std::span<std::uint64_t> out, unsigned mask, TenantId tenant) {
    const std::lock_guard lock(mutex_);
    if (tenant != 0 && tenant >= tenants_.size()) throw Error(Code::kConfig, "tenant " + std::to_string(tenant) + " is not known");
    std::array<std::size_t, kTiers> room{};
    if (alloc_room_locked(mask, tenant, room) < out.size()) return false;
    std::uint64_t* next = out.data();
    std::size_t left = out.size();
    for (unsigned tier = 0; tier < kTiers && left > 0; ++tier) {
        Store& store = stores_[tier];
        const std::size_t n = std::min(left, room[tier]);
        store.free.take_lowest(n, next);
        store.counts.used += n;
        left -= n;
        for (std::uint64_t* const end = next + n; next != end; ++next) {
            const auto slot = static_cast<std::uint32_t>(*next);
            const std::uint32_t id = new_id();
            Block& b = blocks_[id];
            b.refs = 1;
            b.place = tier << 30 | slot;
            store.slots[slot].owner = id;
            *next = handle_of(id, b);
            if (tenant != 0) store.tenants[slot] = tenant;
        }
        if (tenant != 0) tenants_[tenant].used[tier] += n;
    }
    if (tenant != 0) tenants_[tenant].blocks += out.size();
    live_ += out.size();
    return true;
}

std::size_t BlockTable::free(Handles handles) {
    const std::lock_guard lock(mutex_);
    Block* const blocks = blocks_.data();
    const std::uint32_t fresh = fresh_;
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const std::uint32_t id = id_of(handles[i]);
        const bool known = id < fresh && blocks[id].generation == handles[i] >> 32;
        if (known && own_refs(blocks[id]) > 0) {
            drop_ref(blocks[id]);
            continue;
        }
        for (std::size_t j = i; j-- > 0;) add_ref(blocks_[id_of(handles[j])]);
        bad_handle(handles[i]);
    }
    return settle(handles);
}

void BlockTable::retain(Handles handles) {
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t handle : handles) (void)get(handle);
    for (const std::uint64_t handle : handles) add_ref(blocks_[id_of(handle)]);
}

void BlockTable::set_private(Handles handles) {
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t handle : handles) (void)get(handle);
    for (const std::uint64_t handle : handles) blocks_[id_of(handle)].flags |= kPrivate;
}

// --- the index's reference ---------------------------------------------------------------------------------

std::size_t BlockTable::check_insertable(Handles handles) {
    const std::lock_guard lock(mutex_);
    std::size_t indexed = 0;
    require_distinct(handles, [&indexed](std::uint64_t handle, const Block& b) {
        if ((b.flags & kSealed) == 0) {
            throw Error(Code::kNotSealed, "only sealed blocks can be indexed; call seal() when their KV is written", {number(handle)});
        }
        indexed += (b.flags & kIndexed) != 0;
    });
    return indexed;
}

void BlockTable::index(Handles handles) {
    const std::lock_guard lock(mutex_);
    require_distinct(handles, [](std::uint64_t handle, const Block& b) {
        if ((b.flags & kIndexed) != 0) throw Error(Code::kConfig, "a block is indexed already", {number(handle)});
    });
    for (const std::uint64_t handle : handles) {
        Block& b = blocks_[id_of(handle)];
        ++b.refs;
        b.flags |= kIndexed;
        tally(b, 1);
    }
}

std::size_t BlockTable::unindex(Handles handles) {
    const std::lock_guard lock(mutex_);
    require_distinct(handles, [this](std::uint64_t handle, const Block& b) {
        if ((b.flags & kIndexed) == 0) bad_handle(handle);
    });
    for (const std::uint64_t handle : handles) {
        Block& b = blocks_[id_of(handle)];
        tally(b, -1ull);
        --b.refs;
        b.flags = static_cast<std::uint8_t>(b.flags & ~kIndexed);
    }
    return settle(handles);
}

// --- loans -------------------------------------------------------------------------------------------------

void BlockTable::lend(Handles handles, Places out, bool unsealed) {
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t handle : handles) {
        const Block& b = get(handle);
        if ((b.flags & kSealed) == 0 && !unsealed) throw Error(Code::kNotSealed, "only sealed blocks can be lent", {number(handle)});
        if ((b.flags & kPrivate) != 0) throw Error(Code::kPrivate, "a private block is not offered on", {number(handle)});
        if (b.loans + handles.size() > kMaxLoans) throw Error(Code::kConfig, "a block is on too many loans", {number(handle)});
    }
    for (std::size_t i = 0; i < handles.size(); ++i) {
        Block& b = blocks_[id_of(handles[i])];
        Store& store = stores_[tier_of(b)];
        add_ref(b);
        b.loans = (b.loans + 1u) & kMaxLoans;
        store.counts.leased += store.slots[slot_of(b)].loans++ == 0;
        out.tiers[i] = outer_tier(b);
        out.slots[i] = outer_slot(b);
    }
}

std::size_t BlockTable::give_back(Handles handles, std::span<const std::uint8_t> tiers, std::span<const std::int32_t> slots) {
    const std::lock_guard lock(mutex_);
    const auto inner = [&](std::size_t i) -> std::pair<unsigned, std::uint32_t> {
        const auto slot = static_cast<std::uint32_t>(slots[i]);
        return tiers[i] == 0 && slot >= guest_base_ ? std::pair{kGuests, slot - guest_base_} : std::pair{unsigned{tiers[i]}, slot};
    };
    const auto place = [&](std::size_t i) -> Slot* {
        if (tiers[i] >= kTiers || slots[i] < 0) return nullptr;
        const auto [tier, slot] = inner(i);
        return slot < stores_[tier].slots.size() ? &stores_[tier].slots[slot] : nullptr;
    };
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const std::uint32_t id = id_of(handles[i]);
        Slot* const slot = place(i);
        const bool lent = id < fresh_ && blocks_[id].generation == handles[i] >> 32 && blocks_[id].loans > 0;
        if (lent && slot != nullptr && slot->loans > 0 && (slot->owner == id || slot->owner == kLimbo)) {
            drop_ref(blocks_[id]);
            blocks_[id].loans = (blocks_[id].loans - 1u) & kMaxLoans;
            --slot->loans;
            continue;
        }
        for (std::size_t j = i; j-- > 0;) {
            Block& b = blocks_[id_of(handles[j])];
            add_ref(b);
            b.loans = (b.loans + 1u) & kMaxLoans;
            ++place(j)->loans;
        }
        bad_handle(handles[i]);
    }
    for (std::size_t i = 0; i < handles.size(); ++i) ++place(i)->loans;  // a place given twice ends once
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const auto [tier, slot] = inner(i);
        end_loan(tier, slot);
    }
    return settle(handles);
}

// --- places ------------------------------------------------------------------------------------------------

void BlockTable::locate(Handles handles, Places out) const {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const Block& b = get(handles[i]);
        out.tiers[i] = outer_tier(b);
        out.slots[i] = outer_slot(b);
    }
}

void BlockTable::slots(Handles handles, unsigned tier, std::span<std::int32_t> out) const {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const Block& b = get(handles[i]);
        if (outer_tier(b) != tier) {
            throw Error(Code::kNotResident, "block " + std::to_string(handles[i]) + " (number " + std::to_string(i) +
                                                " of the call) lies in another tier; swap it in first", {number(handles[i])});
        }
        out[i] = outer_slot(b);
    }
}

void BlockTable::flags(Handles handles, std::span<std::uint8_t> out) const {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < handles.size(); ++i) {
        out[i] = static_cast<std::uint8_t>(get(handles[i]).flags & (kSealed | kIndexed | kPrivate));
    }
}

// --- moves -------------------------------------------------------------------------------------------------

bool BlockTable::begin_move(Handles handles, unsigned tier, Places from, std::span<std::int32_t> to) {
    const std::lock_guard lock(mutex_);
    require_distinct(handles, [](std::uint64_t handle, const Block& b) {
        if ((b.flags & kMoving) != 0) throw Error(Code::kConfig, "a block is being moved already", {number(handle)});
        if (tier_of(b) == kGuests) throw Error(Code::kConfig, "a block in another pool's pages stays there", {number(handle)});
        if ((b.flags & kSealed) == 0 && b.loans > 0) {
            throw Error(Code::kNotSealed, "a block that is lent layer by layer stays until all its layers are sealed", {number(handle)});
        }
    });
    Store& store = stores_.at(tier);
    const bool within = std::all_of(handles.begin(), handles.end(), [&](auto h) { return tier_of(blocks_[id_of(h)]) == tier; });
    if ((within ? store.free.count() : store.room()) < handles.size()) return false;
    store.free.take_lowest(handles.size(), to.data());
    if (!tenants_.empty() && !charge_move(handles, tier, to)) {
        for (std::size_t i = 0; i < handles.size(); ++i) store.free.insert(static_cast<std::size_t>(to[i]));
        return false;
    }
    store.counts.used += handles.size();
    store.counts.reserved += handles.size();
    for (std::size_t i = 0; i < handles.size(); ++i) {
        Block& b = blocks_[id_of(handles[i])];
        store.slots[to[i]].owner = kReserved;
        from.tiers[i] = static_cast<std::uint8_t>(tier_of(b));
        from.slots[i] = static_cast<std::int32_t>(slot_of(b));
        add_ref(b);
        b.flags |= kMoving;
    }
    return true;
}

std::size_t BlockTable::commit_move(Handles handles, unsigned tier, std::span<const std::int32_t> to) {
    return finish_move(handles, tier, to, true);
}

std::size_t BlockTable::abort_move(Handles handles, unsigned tier, std::span<const std::int32_t> to) {
    return finish_move(handles, tier, to, false);
}

std::size_t BlockTable::finish_move(Handles handles, unsigned tier, std::span<const std::int32_t> to, bool commit) {
    const std::lock_guard lock(mutex_);
    Store& store = stores_.at(tier);
    std::size_t i = 0;
    require_distinct(handles, [&](std::uint64_t handle, const Block& b) {
        const bool target = to[i] >= 0 && static_cast<std::size_t>(to[i]) < store.slots.size() &&
                            store.slots[to[i]].owner == kReserved;
        ++i;
        if ((b.flags & kMoving) == 0 || !target) throw Error(Code::kConfig, "a block is not being moved there", {number(handle)});
    });
    store.counts.reserved -= handles.size();
    for (i = 0; i < handles.size(); ++i) {
        const std::uint32_t id = id_of(handles[i]);
        const auto slot = static_cast<std::uint32_t>(to[i]);
        Block& b = blocks_[id];
        if (commit) {
            tally(b, -1ull);
            release_slot(tier_of(b), slot_of(b));
            store.slots[slot].owner = id;
            b.place = tier << 30 | slot;
            tally(b, 1);
            if (tier == kMirrorTier) drop_mirror(id);
        } else {
            release_slot(tier, slot);
        }
        b.flags = static_cast<std::uint8_t>(b.flags & ~kMoving);
        drop_ref(b);
    }
    return settle(handles);
}

// --- sizes -------------------------------------------------------------------------------------------------

void BlockTable::set_limit(unsigned tier, std::uint32_t limit) {
    if (limit >= kMaxSlots) throw Error(Code::kConfig, "a tier holds at most " + std::to_string(kMaxSlots - 1) + " blocks");
    const std::lock_guard lock(mutex_);
    Store& store = stores_.at(tier);
    const auto before = static_cast<std::uint32_t>(store.counts.limit);
    if (limit > store.slots.size()) {
        blocks_.resize(blocks_.size() + limit - store.slots.size(), Block{first_generation_});
        if (!layers_.empty()) layers_.resize(blocks_.size());
        if (!mirrors_.empty()) mirrors_.resize(blocks_.size(), kNobody);
        store.slots.resize(limit, {kNobody, 0});
        if (!tenants_.empty()) store.tenants.resize(limit);
        store.free.grow(limit);
    }
    for (std::uint32_t slot = before; slot < limit; ++slot) {
        if (store.slots[slot].owner == kNobody) store.free.insert(slot);
        else --store.counts.overhang;
    }
    for (std::uint32_t slot = limit; slot < before; ++slot) {
        if (store.slots[slot].owner == kNobody) store.free.erase(slot);
        else ++store.counts.overhang;
    }
    store.counts.limit = limit;
}

std::vector<std::uint64_t> BlockTable::evictable_overhang(unsigned tier) const {
    const std::lock_guard lock(mutex_);
    const Store& store = stores_.at(tier);
    std::vector<std::uint64_t> found;
    for (std::size_t slot = store.counts.limit; slot < store.slots.size(); ++slot) {
        const std::uint32_t id = store.slots[slot].owner;
        if (id >= kReserved || is_mirror(tier, static_cast<std::uint32_t>(slot))) continue;
        const Block& b = blocks_[id];
        if ((b.flags & kIndexed) != 0 && b.refs == 1) found.push_back(handle_of(id, b));
    }
    return found;
}

std::vector<std::uint32_t> BlockTable::overhang(unsigned tier) const {
    const std::lock_guard lock(mutex_);
    const Store& store = stores_.at(tier);
    std::vector<std::uint32_t> found;
    if (store.counts.overhang == 0) return found;
    for (auto slot = static_cast<std::uint32_t>(store.counts.limit); slot < store.slots.size(); ++slot) {
        if (store.slots[slot].owner != kNobody) found.push_back(slot);
    }
    return found;
}

std::uint32_t BlockTable::used_end(unsigned tier) const {
    const std::lock_guard lock(mutex_);
    const std::vector<Slot>& slots = stores_.at(tier).slots;
    std::size_t end = slots.size();
    while (end > 0 && slots[end - 1].owner == kNobody) --end;
    return static_cast<std::uint32_t>(end);
}

// --- questions ---------------------------------------------------------------------------------------------

bool BlockTable::is_evictable(std::uint64_t handle, unsigned mask) const noexcept {
    const std::lock_guard lock(mutex_);
    const std::uint32_t id = id_of(handle);
    if (id >= fresh_ || blocks_[id].generation != handle >> 32) return false;
    const Block& b = blocks_[id];
    return b.refs == 1 && (b.flags & kIndexed) != 0 && (mask >> tier_of(b) & 1) != 0;
}

TierCounts BlockTable::counts(unsigned tier) const {
    const std::lock_guard lock(mutex_);
    TierCounts counts = stores_.at(tier).counts;
    counts.free = stores_[tier].room();
    return counts;
}

std::size_t BlockTable::longest_free_run(unsigned tier) const {
    const std::lock_guard lock(mutex_);
    return stores_.at(tier).free.longest_run();
}

std::uint64_t BlockTable::num_live() const {
    const std::lock_guard lock(mutex_);
    return live_;
}

// --- under the mutex ---------------------------------------------------------------------------------------

std::uint32_t BlockTable::own_refs(const Block& b) noexcept {
    const std::uint32_t others = b.loans + ((b.flags & kIndexed) != 0 ? 1u : 0u) + ((b.flags & kMoving) != 0 ? 1u : 0u);
    return b.refs - others;
}

const BlockTable::Block& BlockTable::get(std::uint64_t handle) const {
    const std::uint32_t id = id_of(handle);
    if (id >= fresh_ || blocks_[id].generation != handle >> 32 || blocks_[id].refs == 0) bad_handle(handle);
    return blocks_[id];
}

void BlockTable::bad_handle(std::uint64_t handle) const {
    const std::uint32_t id = id_of(handle);
    const std::uint64_t generation = handle >> 32;
    const std::uint64_t current = id < fresh_ ? blocks_[id].generation : 0;
    const bool live = id < fresh_ && blocks_[id].refs > 0;
    if (generation == 0 || generation > current || (generation == current && !live)) {
        throw Error(Code::kUnknownBlock, "handle " + std::to_string(handle) + " was never given out by this pool", {number(handle)});
    }
    if (generation < first_generation_) {
        throw Error(Code::kStaleHandle, "handle " + std::to_string(handle) + " is another pool's, or of an earlier life of this one",
                    {number(handle), number(generation), number(current)});
    }
    const std::string why = generation == current ? " has no reference left that is the caller's to use"
                                                  : " was freed: its block is in generation " + std::to_string(current);
    throw Error(Code::kStaleHandle, "handle " + std::to_string(handle) + " (generation " + std::to_string(generation) + ")" + why,
                {number(handle), number(generation), number(current)});
}

// Each handle is live, none is given twice, and `require(handle, block)` holds.
template <typename Require>
void BlockTable::require_distinct(Handles handles, Require require) {
    std::size_t marked = 0;
    const auto unmark = [&] {
        while (marked > 0) {
            Block& b = blocks_[id_of(handles[--marked])];
            b.flags = static_cast<std::uint8_t>(b.flags & ~kMarked);
        }
    };
    try {
        for (const std::uint64_t handle : handles) {
            Block& b = get(handle);
            if ((b.flags & kMarked) != 0) throw Error(Code::kConfig, "a block is given twice", {number(handle)});
            require(handle, b);
            b.flags |= kMarked;
            ++marked;
        }
    } catch (...) {
        unmark();
        throw;
    }
    unmark();
}

// Count an indexed block in (sign 1) or out (sign -1) of its tier's figures.
void BlockTable::tally(const Block& b, std::uint64_t sign) noexcept {
    if ((b.flags & kIndexed) == 0) [[likely]] return;
    TierCounts& counts = stores_[tier_of(b)].counts;
    (b.refs == 1 ? counts.historical : counts.pinned) += sign;
    if (TenantCounts* tenant = b.refs == 1 ? tenant_at(tier_of(b), slot_of(b)) : nullptr) tenant->historical[tier_of(b)] += sign;
}

void BlockTable::add_ref(Block& b) noexcept {
    tally(b, -1ull);
    ++b.refs;
    tally(b, 1);
}

void BlockTable::drop_ref(Block& b) noexcept {
    tally(b, -1ull);
    --b.refs;
    tally(b, 1);
}

std::uint32_t BlockTable::new_id() noexcept {
    if (free_ids_ == kNobody) return fresh_++;
    const std::uint32_t id = free_ids_;
    free_ids_ = blocks_[id].place;
    return id;
}

// After references were dropped: free what has none left. -> how many blocks are free or evictable now.
std::size_t BlockTable::settle(Handles handles) {
    std::size_t available = 0;
    const Block* const blocks = blocks_.data();
    for (const std::uint64_t handle : handles) {
        const std::uint32_t id = id_of(handle);
        const Block& b = blocks[id];
        if (b.generation != handle >> 32) continue;  // given twice and freed a moment ago
        if (b.refs == 0) {
            release(id);
            ++available;
        } else {
            available += b.refs == 1 && (b.flags & kIndexed) != 0;
        }
    }
    return available;
}

void BlockTable::release(std::uint32_t id) {
    Block& b = blocks_[id];
    if (TenantCounts* tenant = tenant_at(tier_of(b), slot_of(b))) --tenant->blocks;
    release_slot(tier_of(b), slot_of(b));
    if (!plain_) drop_mirror(id);
    if (++b.generation == 0) b.generation = 1;
    b.flags = 0;
    if (!plain_ && !layers_.empty()) layers_[id] = 0;
    b.place = free_ids_;
    free_ids_ = id;
    --live_;
}

// The block left this slot: free, or in limbo until its loans end.
void BlockTable::release_slot(unsigned tier, std::uint32_t slot) {
    Store& store = stores_[tier];
    if (store.slots[slot].loans > 0) {
        store.slots[slot].owner = kLimbo;
        ++store.counts.limbo;
        return;
    }
    store.slots[slot].owner = kNobody;
    --store.counts.used;
    if (TenantCounts* tenant = tenant_at(tier, slot)) {
        --tenant->used[tier];
        store.tenants[slot] = 0;
    }
    if (slot < store.counts.limit) store.free.insert(slot);
    else --store.counts.overhang;
    if (tier == kGuests) [[unlikely]] {
        departed_.push_back(static_cast<std::int32_t>(slot + guest_base_));
        has_departed_.store(true, std::memory_order_relaxed);
    }
}

void BlockTable::end_loan(unsigned tier, std::uint32_t slot) {
    Store& store = stores_[tier];
    Slot& s = store.slots[slot];
    if (--s.loans > 0) return;
    --store.counts.leased;
    if (s.owner != kLimbo) return;
    --store.counts.limbo;
    release_slot(tier, slot);
}

}  // namespace poolweave
