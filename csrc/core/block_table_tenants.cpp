// Who pays for blocks: slots by tenant, and limits that no allocation or move passes.
#include <algorithm>
#include <string>

#include "core/block_table.hpp"
#include "core/error.hpp"

namespace poolweave {

void BlockTable::set_tenants(std::size_t count) {
    const std::lock_guard lock(mutex_);
    if (tenants_.empty() && live_ > 0) throw Error(Code::kConfig, "tenants are counted from the first block on");
    plain_ = false;
    tenants_.resize(std::max({tenants_.size(), count, std::size_t{1}}));
    for (Store& store : stores_) store.tenants.resize(store.slots.size());
}

void BlockTable::set_quota(TenantId tenant, std::array<std::uint64_t, kTiers> limit, std::uint64_t block_limit) {
    const std::lock_guard lock(mutex_);
    if (tenant == 0) throw Error(Code::kConfig, "tenant 0 has no quota");
    TenantCounts& counts = tenants_.at(tenant);
    counts.limit = limit;
    counts.block_limit = block_limit;
}

TenantCounts BlockTable::tenant(TenantId tenant) const {
    const std::lock_guard lock(mutex_);
    return tenants_.at(tenant);
}

std::size_t BlockTable::alloc_room(unsigned mask, TenantId tenant) const {
    const std::lock_guard lock(mutex_);
    std::array<std::size_t, kTiers> room{};
    return alloc_room_locked(mask, tenant, room);
}

std::size_t BlockTable::tenant_room(TenantId tenant, unsigned mask) const {
    const std::lock_guard lock(mutex_);
    std::uint64_t room = 0;
    for (unsigned tier = 0; tier < kTiers; ++tier) {
        const std::uint64_t more = (mask >> tier & 1) != 0 ? room_locked(tenant, tier) : 0;
        room = more > TenantCounts::kNoLimit - room ? TenantCounts::kNoLimit : room + more;
    }
    if (tenant == 0) return room;
    const TenantCounts& counts = tenants_.at(tenant);
    return std::min(room, counts.block_limit - std::min(counts.block_limit, counts.blocks));
}

void BlockTable::tenants_of(Handles handles, std::span<TenantId> out) const {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const Block& b = get(handles[i]);
        out[i] = tenants_.empty() ? TenantId{0} : stores_[tier_of(b)].tenants[slot_of(b)];
    }
}

void BlockTable::fit_quotas(Handles handles, unsigned tier, std::span<std::uint8_t> out) const {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> added(tenants_.size());
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const Block& b = get(handles[i]);
        const TenantId tenant = tenants_.empty() ? TenantId{0} : stores_[tier_of(b)].tenants[slot_of(b)];
        out[i] = tenant == 0 || tier_of(b) == tier || added[tenant] < room_locked(tenant, tier);
        if (tenant != 0) added[tenant] += out[i];
    }
}

// Charge the targets of a move to the blocks' tenants; false, and no charge, when one's limit is in the way. A move within
// its tier passes a limit for as long as it takes.
bool BlockTable::charge_move(Handles handles, unsigned tier, std::span<const std::int32_t> to) {
    Store& store = stores_[tier];
    std::size_t done = 0;
    for (; done < handles.size(); ++done) {
        const Block& b = blocks_[id_of(handles[done])];
        const TenantId tenant = stores_[tier_of(b)].tenants[slot_of(b)];
        if (tier_of(b) != tier && room_locked(tenant, tier) == 0) break;
        store.tenants[to[done]] = tenant;
        if (tenant != 0) ++tenants_[tenant].used[tier];
    }
    if (done == handles.size()) return true;
    while (done-- > 0) {
        if (TenantCounts* tenant = tenant_at(tier, static_cast<std::uint32_t>(to[done]))) --tenant->used[tier];
        store.tenants[to[done]] = 0;
    }
    return false;
}

}  // namespace poolweave
