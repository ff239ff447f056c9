// Logical blocks: who refers to each, where it lies, what may be done with it. Knows no bytes.
//
// A handle is generation << 32 | id; a freed id gets the next generation, so an old handle is told from a live one.
// Generations begin at a number drawn from the table's epoch, so that a bare handle of an earlier life of a pool, or of
// another pool, fits this one's with a chance of 1 in 2^31 only.
// References: the callers' own, one of the index, one a loan, one while moved. The slot of a block may change, its
// handle never does. A place on loan that its block has left (a limbo slot) is free only when the loan ends.
// Every call is atomic: it throws kUnknownBlock, kStaleHandle, ... before anything changed. Thread-safe.
// 16 bytes a block (18 once somebody seals by layer), 8 a slot (10 with quotas), 4 a block once it is
// mirrored, 1.02 bits a slot in the free set.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/evictable.hpp"
#include "core/slot_set.hpp"

namespace poolweave {

// Behind the two tiers lie guests: blocks whose bytes are in another pool's pages (range.hpp). They count apart, nothing is
// allocated or moved there, and outside this class they lie in tier 0, at slots from `guest_base` on.
inline constexpr std::size_t kTiers = 3;
inline constexpr unsigned kGuests = 2;
using Handles = std::span<const std::uint64_t>;

// Where blocks lie: tier number (0 the fastest) and slot, one of each a block.
struct Places {
    std::span<std::uint8_t> tiers;
    std::span<std::int32_t> slots;
};

struct TierCounts {
    std::uint64_t limit = 0;       // slots that may be allocated
    std::uint64_t free = 0;        // how many can be allocated now; none while `used` exceeds the limit
    std::uint64_t used = 0;        // occupied, above the limit too; limbo and move targets count
    std::uint64_t historical = 0;  // only the index refers to them: evictable
    std::uint64_t pinned = 0;      // indexed, and others refer to them too
    std::uint64_t leased = 0;      // slots on loan
    std::uint64_t limbo = 0;       // on loan, their block has left or ended
    std::uint64_t reserved = 0;    // targets of moves under way
    std::uint64_t overhang = 0;    // occupied at or above the limit
    std::uint64_t mirrors = 0;     // second copies of blocks that lie in the tier above
};

// What the blocks of one tenant take, and what they may take, in slots. Tenant 0 is nobody's: not counted, never limited.
using TenantId = std::uint16_t;
struct TenantCounts {
    static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
    std::array<std::uint64_t, kTiers> used{};        // slots by tier; limbo and move targets count
    std::array<std::uint64_t, kTiers> historical{};  // of them evictable
    std::array<std::uint64_t, kTiers> limit{kNoLimit, kNoLimit, kNoLimit};
    std::uint64_t blocks = 0;                        // live ones, wherever they lie
    std::uint64_t block_limit = kNoLimit;
};

class BlockTable {
  public:
    // `epoch` names this table among others; 0 when nobody asks. A block is sealed when all its `num_layers` are.
    explicit BlockTable(std::array<std::uint32_t, kTiers> limits, std::uint64_t epoch = 0, std::uint32_t num_layers = 1);
    BlockTable(const BlockTable&) = delete;
    BlockTable& operator=(const BlockTable&) = delete;

    // Blocks in the tiers of `mask` (bit t = tier t), the lowest tier and the lowest slots first, one reference each.
    // All of `out` or, returning false, none: also when it would take `tenant` over a limit.
    bool alloc(std::span<std::uint64_t> out, unsigned mask, TenantId tenant = 0);
    // Drop one of the callers' references on each. Returns how many blocks became free or evictable by it.
    std::size_t free(Handles handles);
    void retain(Handles handles);
    void seal(Handles handles);
    // Layers [first, last) of each are written. Throws kConfig when layers before `first` are not sealed yet, or `last` is
    // past the layers there are.
    void seal_layers(Handles handles, std::uint32_t first, std::uint32_t last);
    void sealed_layers(Handles handles, std::span<std::uint16_t> out) const;  // how many, from the first on
    void set_private(Handles handles);

    // What the index took and gave up. `check_insertable` throws kNotSealed, and kConfig for a block given twice.
    // It returns how many are indexed already. `index` adds the index's reference, `unindex` drops it.
    std::size_t check_insertable(Handles handles);
    void index(Handles handles);
    std::size_t unindex(Handles handles);

    // A loan pins the blocks and their places. Throws kPrivate, and kNotSealed unless `unsealed` ones are lent too: their
    // borrower reads a layer when it is sealed, and until all are the block stays where it is.
    void lend(Handles handles, Places out, bool unsealed = false);
    std::size_t give_back(Handles handles, std::span<const std::uint8_t> tiers, std::span<const std::int32_t> slots);

    void locate(Handles handles, Places out) const;
    // Rows in `tier`; throws kNotResident.
    void slots(Handles handles, unsigned tier, std::span<std::int32_t> out) const;
    void flags(Handles handles, std::span<std::uint8_t> out) const;  // kSealed | kIndexed | kPrivate

    // A move: take slots in `tier`, copy the bytes, then commit or abort. Until then the block stays where it is and is
    // no victim. False when `tier` has too few free slots, or a tenant's limit is in the way. Throws kConfig for a block that is being moved already, and
    // kNotSealed for one that is on loan while it is written.
    bool begin_move(Handles handles, unsigned tier, Places from, std::span<std::int32_t> to);
    std::size_t commit_move(Handles handles, unsigned tier, std::span<const std::int32_t> to);
    std::size_t abort_move(Handles handles, unsigned tier, std::span<const std::int32_t> to);

    // Make room in the books for tenants below `count`, and count from now on: call it before anything is allocated.
    void set_tenants(std::size_t count);
    void set_quota(TenantId tenant, std::array<std::uint64_t, kTiers> limit, std::uint64_t block_limit);
    TenantCounts tenant(TenantId tenant) const;
    // How many blocks alloc() could give the tenant now.
    std::size_t alloc_room(unsigned mask, TenantId tenant) const;
    // How many more blocks the tenant's limits let it have in the tiers of `mask`.
    std::size_t tenant_room(TenantId tenant, unsigned mask) const;
    void tenants_of(Handles handles, std::span<TenantId> out) const;
    // Which of the blocks, taken in order, their tenants' limits let lie in `tier`.
    void fit_quotas(Handles handles, unsigned tier, std::span<std::uint8_t> out) const;

    // Mirrors: second copies in tier 1 of sealed blocks in tier 0; whoever needs the room may drop them. Choose the first of
    // `handles` that can get one: they may be gone, elsewhere, or have one. -> how many; copy their bytes, then end it.
    std::size_t begin_mirrors(Handles handles, std::span<std::uint64_t> chosen, std::span<std::int32_t> from,
                              std::span<std::int32_t> to);
    std::size_t end_mirrors(Handles chosen, std::span<const std::int32_t> to, bool commit);
    // Let blocks lie where their mirrors are. -> those that have none and were left alone
    std::vector<std::uint64_t> demote_mirrored(Handles handles);
    // Up to `count` mirrors (of one tenant, if not 0), the highest slots first and none below `from_slot`. -> how many
    std::size_t drop_mirrors(std::size_t count, std::uint32_t from_slot = 0, TenantId tenant = 0);

    // Guests may lie at slots [base, base + count) from now on; `base` is said once, before the first.
    void set_guests(std::uint32_t base, std::uint32_t count);
    // Blocks at these slots, one reference each, for as many as can be from the first on. -> how many. A block that lies there
    // already gets one more, and 0 in `fresh`; one that is gone but still lent ends the row.
    std::size_t adopt(std::span<const std::int32_t> slots, std::span<std::uint64_t> out, std::span<std::uint8_t> fresh);
    // Slots that guests have left since the last call.
    std::vector<std::int32_t> take_departed();
    bool has_departed() const noexcept { return has_departed_.load(std::memory_order_relaxed); }

    // Raise or lower what may be allocated in `tier`. Blocks at or above a lowered limit stay until freed or moved.
    void set_limit(unsigned tier, std::uint32_t limit);
    // Evictable blocks at or above the limit; occupied slots there, ascending.
    std::vector<std::uint64_t> evictable_overhang(unsigned tier) const;
    std::vector<std::uint32_t> overhang(unsigned tier) const;
    // One more than the highest occupied slot.
    std::uint32_t used_end(unsigned tier) const;

    std::uint64_t epoch() const noexcept { return epoch_; }
    bool is_evictable(std::uint64_t handle, unsigned mask) const noexcept;
    TierCounts counts(unsigned tier) const;
    std::size_t longest_free_run(unsigned tier) const;
    std::uint64_t num_live() const;
    void check() const;  // throws std::logic_error

    static constexpr std::uint8_t kSealed = 1;
    static constexpr std::uint8_t kIndexed = 2;
    static constexpr std::uint8_t kPrivate = 4;

  private:
    static constexpr unsigned kMirrorTier = 1;
    static constexpr std::uint8_t kMoving = 8;
    static constexpr std::uint8_t kMarked = 16;  // within one call

    static constexpr std::uint32_t kNobody = 0xffffffffu;    // a free slot; also the end of the list of free ids
    static constexpr std::uint32_t kLimbo = 0xfffffffeu;     // on loan, and its block has left
    static constexpr std::uint32_t kReserved = 0xfffffffdu;  // the target of a move

    struct Block {
        std::uint32_t generation = 1;
        std::uint32_t refs = 0;   // 0: free
        std::uint32_t place = 0;  // tier << 30 | slot; of a free block: the next free id
        std::uint32_t loans : 24 = 0;
        std::uint32_t flags : 8 = 0;
    };
    struct Slot {
        std::uint32_t owner;  // a block's id, or kNobody, kLimbo, kReserved
        std::uint32_t loans;
    };
    struct Store {
        std::vector<Slot> slots;
        SlotSet free;
        TierCounts counts;
        std::vector<TenantId> tenants;  // whose each occupied slot is; empty while tenants are not counted

        // A lowered limit bounds what is used in all, also while blocks above it are still there.
        std::size_t room() const noexcept {
            return counts.used >= counts.limit ? 0 : std::min<std::size_t>(free.count(), counts.limit - counts.used);
        }
    };

    static std::uint32_t id_of(std::uint64_t handle) noexcept { return static_cast<std::uint32_t>(handle); }
    static std::uint64_t handle_of(std::uint32_t id, const Block& b) noexcept { return std::uint64_t{b.generation} << 32 | id; }
    static unsigned tier_of(const Block& b) noexcept { return b.place >> 30; }
    static std::uint32_t slot_of(const Block& b) noexcept { return b.place & 0x3fffffffu; }
    static std::uint32_t own_refs(const Block& b) noexcept;  // the callers' part of refs

    const Block& get(std::uint64_t handle) const;
    Block& get(std::uint64_t handle) { return const_cast<Block&>(std::as_const(*this).get(handle)); }
    [[noreturn]] void bad_handle(std::uint64_t handle) const;
    template <typename Require>
    void require_distinct(Handles handles, Require require);
    void tally(const Block& b, std::uint64_t sign) noexcept;
    void add_ref(Block& b) noexcept;
    void drop_ref(Block& b) noexcept;
    std::uint32_t new_id() noexcept;
    std::size_t settle(Handles handles);
    void release(std::uint32_t id);
    void take_slots(unsigned tier, std::size_t n, std::uint32_t* out);
    void release_slot(unsigned tier, std::uint32_t slot);
    void end_loan(unsigned tier, std::uint32_t slot);
    std::size_t finish_move(Handles handles, unsigned tier, std::span<const std::int32_t> to, bool commit);
    void check_slots(unsigned tier) const;
    std::size_t alloc_room_locked(unsigned mask, TenantId tenant, std::array<std::size_t, kTiers>& room) const noexcept;
    std::uint64_t room_locked(TenantId tenant, unsigned tier) const noexcept {
        if (tenant == 0) [[likely]] return TenantCounts::kNoLimit;
        const TenantCounts& counts = tenants_[tenant];
        return counts.limit[tier] - std::min(counts.limit[tier], counts.used[tier]);
    }
    std::int32_t outer_slot(const Block& b) const noexcept {
        return static_cast<std::int32_t>(slot_of(b) + (tier_of(b) == kGuests ? guest_base_ : 0));
    }
    static std::uint8_t outer_tier(const Block& b) noexcept {
        return static_cast<std::uint8_t>(tier_of(b) == kGuests ? 0 : tier_of(b));
    }
    bool charge_move(Handles handles, unsigned tier, std::span<const std::int32_t> to);
    // Whose this slot is; nullptr for nobody's.
    TenantCounts* tenant_at(unsigned tier, std::uint32_t slot) noexcept {
        if (plain_ || tenants_.empty()) [[likely]] return nullptr;
        const TenantId tenant = stores_[tier].tenants[slot];
        return tenant == 0 ? nullptr : &tenants_[tenant];
    }
    void check_tenants() const;
    bool is_mirror(unsigned tier, std::uint32_t slot) const noexcept;
    bool can_mirror(std::uint64_t handle) const noexcept;
    void drop_mirror(std::uint32_t id);
    std::uint32_t layers_of(std::uint32_t id) const noexcept;

    const std::uint64_t epoch_;
    const std::uint32_t num_layers_;
    const std::uint32_t first_generation_;
    mutable std::mutex mutex_;
    bool plain_ = true;  // nobody sealed by layer, mirrored or counted tenants so far: one look instead of three
    std::uint32_t fresh_ = 0;  // ids from here on were never used
    std::uint32_t free_ids_;   // head of the list of freed ids
    std::uint64_t live_ = 0;
    std::vector<Block> blocks_;
    std::array<Store, kTiers> stores_;
    std::vector<std::uint16_t> layers_;   // sealed ones of blocks that are not sealed; empty until somebody seals by layer
    std::vector<TenantCounts> tenants_;   // by id; empty while they are not counted
    std::vector<std::uint32_t> mirrors_;  // slots in kMirrorTier by id, kNobody: none; empty until there is one
    std::uint32_t mirrors_end_ = 0;       // no mirror lies at or above this slot
    std::uint32_t guest_base_ = kNobody;  // slots of tier 0 from here on are guests'; kNobody: there are none
    std::vector<std::int32_t> departed_;
    std::atomic<bool> has_departed_ = false;
};

// The table as the index sees it: which payloads of these tiers may go.
class EvictableBlocks final : public Evictable {
  public:
    EvictableBlocks(std::shared_ptr<const BlockTable> table, unsigned mask) : table_(std::move(table)), mask_(mask) {}
    bool evictable(std::uint64_t payload) const noexcept override { return table_->is_evictable(payload, mask_); }

  private:
    std::shared_ptr<const BlockTable> table_;
    unsigned mask_;
};

}  // namespace poolweave
