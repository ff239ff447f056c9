// Guests of a block table: blocks whose bytes lie in another pool's pages.
#include <string>
#include <utility>

#include "core/block_table.hpp"
#include "core/error.hpp"

namespace poolweave {

void BlockTable::set_guests(std::uint32_t base, std::uint32_t count) {
    {
        const std::lock_guard lock(mutex_);
        if (guest_base_ != kNobody && guest_base_ != base) throw Error(Code::kConfig, "guests begin at another slot already");
        if (base < stores_[0].slots.size()) {
            throw Error(Code::kConfig, "guests cannot begin at slot " + std::to_string(base) + ", among the pool's own");
        }
        guest_base_ = base;
    }
    set_limit(kGuests, count);
}

std::size_t BlockTable::adopt(std::span<const std::int32_t> slots, std::span<std::uint64_t> out, std::span<std::uint8_t> fresh) {
    const std::lock_guard lock(mutex_);
    Store& store = stores_[kGuests];
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::uint32_t slot = static_cast<std::uint32_t>(slots[i]) - guest_base_;
        if (slots[i] < 0 || slot >= store.counts.limit) {
            throw Error(Code::kConfig, "slot " + std::to_string(slots[i]) + " is no place for a guest");
        }
        const std::uint32_t owner = store.slots[slot].owner;
        if (owner == kLimbo) return i;
        fresh[i] = owner == kNobody;
        if (owner != kNobody) {
            add_ref(blocks_[owner]);
            out[i] = handle_of(owner, blocks_[owner]);
            continue;
        }
        const std::uint32_t id = new_id();
        Block& b = blocks_[id];
        b.refs = 1;
        b.place = kGuests << 30 | slot;
        store.free.erase(slot);
        store.slots[slot].owner = id;
        ++store.counts.used;
        ++live_;
        out[i] = handle_of(id, b);
    }
    return slots.size();
}

std::vector<std::int32_t> BlockTable::take_departed() {
    const std::lock_guard lock(mutex_);
    has_departed_.store(false, std::memory_order_relaxed);
    return std::exchange(departed_, {});
}

}  // namespace poolweave
