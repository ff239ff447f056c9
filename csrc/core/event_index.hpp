// Which sources hold which blocks of which prompts, as told by their KV events.
//
// A block is known by its scope (adapter, salt), its tokens, its extra keys and the block before it, all compared
// exactly. A source's hashes are only its names for blocks: they find a parent or what is to be removed, and are
// never compared between sources. Holding is kept per block, so a block stays credited when one before it is removed
// and stored again, but a match counts only what is held without a hole from the start.
//
// Threads: match() calls run in parallel, everything else is exclusive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/child_table.hpp"
#include "core/held_table.hpp"
#include "core/kv_events.hpp"
#include "core/page_array.hpp"
#include "core/shared_lock.hpp"

namespace poolweave {

// How one source is to be read.
struct SourceRules {
    bool counts_copies = false;            // each store of a block is one more copy, each removal takes one
    std::size_t max_blocks = 1u << 24;     // stores above it are refused
    std::uint8_t credited_media = 0b011;   // a bit each Medium: holding a block elsewhere does not count
};

// What a batch did, in blocks.
struct EventReport {
    double timestamp = 0;
    std::uint64_t stored = 0;      // newly held
    std::uint64_t repeated = 0;    // held already
    std::uint64_t removed = 0;     // no longer held
    std::uint64_t unknown = 0;     // removed, but not held
    std::uint64_t orphans = 0;     // stored after a parent that is not held: not credited
    std::uint64_t doubtful = 0;    // removed once after several stores: no longer credited, perhaps still there
    std::uint64_t conflicts = 0;   // a hash in use for another block: not credited
    std::uint64_t skipped = 0;     // of another block size, or without plain tokens
    std::uint64_t refused = 0;     // above max_blocks
    std::uint64_t clears = 0;      // AllBlocksCleared
    bool several_groups = false;   // the source keeps several cache groups: a block of one is not a prefix hit

    // What was told fits what was known, and nothing was cleared.
    bool uneventful() const noexcept { return (orphans | doubtful | conflicts | refused | clears) == 0 && !several_groups; }
};

// Consecutive blocks, the first after `parent` (none: it starts a prompt).
struct StoredRun {
    bool has_parent = false;
    std::uint64_t parent = 0;
    std::uint8_t media = 0;                // a bit each Medium that holds all of them
    std::string scope;
    std::vector<std::uint64_t> hashes;
    std::vector<std::int32_t> tokens;
};

struct EventIndexStats {
    std::size_t num_blocks, num_entries, num_sources, nbytes;
};

class EventIndex {
  public:
    explicit EventIndex(std::uint32_t block_tokens);
    EventIndex(const EventIndex&) = delete;
    EventIndex& operator=(const EventIndex&) = delete;

    // A slot: a small number, reused after drop_source. A new source is trusted.
    std::uint32_t add_source(const SourceRules& rules);
    void drop_source(std::uint32_t source);
    // A source that is not trusted is credited with nothing; what it holds is kept.
    void set_trusted(std::uint32_t source, bool trusted);
    // Forgets all that it holds.
    void clear(std::uint32_t source);

    // Throws Error(kMalformed) and changes nothing when `payload` is no batch of events.
    EventReport apply(std::uint32_t source, std::string_view payload);

    // scores[slot] = leading blocks that the source holds, for every trusted source. `extra_keys` has the raw msgpack
    // of each block's extra keys, empty for none; blocks beyond it have none. Returns how many blocks anybody knows.
    std::size_t match(std::span<const std::int32_t> tokens, std::string_view scope, std::span<const std::string_view> extra_keys,
                      std::span<std::int32_t> scores) const;

    // All that a source holds without a hole, parents first. Blocks with extra keys, and what follows them, are left out.
    std::vector<StoredRun> inventory(std::uint32_t source) const;
    std::size_t num_held(std::uint32_t source) const;
    std::size_t num_slots() const;         // one more than the highest slot ever given
    std::uint32_t block_tokens() const noexcept { return block_tokens_; }
    EventIndexStats stats() const;
    std::string check() const;             // what is wrong, or an empty string

  private:
    using BlockId = std::uint32_t;         // 0 = none
    // Most blocks have one child, which is then found without a table; the others are in children_.
    struct Block {
        BlockId parent;                    // 0 for the root of a scope
        BlockId first_child;
        std::uint32_t other_children;
        std::uint32_t refs;                // entries that name it, and children
        std::uint32_t depth;               // 0 for a root
        std::uint32_t extra;               // 0 = no extra keys
    };
    struct Chunk {
        PageArray<Block> blocks;
        PageArray<std::int32_t> tokens;
        PageArray<std::uint64_t> holders;  // words_ a block: a bit each source
    };
    struct Source {
        bool live = false;
        SourceRules rules;
        bool has_group = false;
        std::uint64_t group = 0;
        HeldTable held;
    };
    struct Extra {
        std::string raw;
        std::size_t refs = 0;              // blocks that have it
    };
    static constexpr std::uint32_t kMostChunkBits = 17;
    static constexpr std::size_t kChunkTokens = std::size_t{1} << 21;  // about: 8 MiB of them

    std::size_t chunk_size() const noexcept { return std::size_t{1} << chunk_bits_; }

    Block& block(BlockId id) const noexcept { return chunks_[id >> chunk_bits_].blocks[within(id)]; }
    std::int32_t* tokens_of(BlockId id) const noexcept { return &chunks_[id >> chunk_bits_].tokens[within(id) * block_tokens_]; }
    std::uint64_t* holders_of(BlockId id) const noexcept { return &chunks_[id >> chunk_bits_].holders[within(id) * words_]; }
    std::size_t within(BlockId id) const noexcept { return id & (chunk_size() - 1); }
    Source& live_source(std::uint32_t source);
    const Source& live_source(std::uint32_t source) const;
    std::uint32_t bucket(BlockId parent, const std::int32_t* tokens, std::uint32_t extra) const noexcept;
    bool is(BlockId id, BlockId parent, const std::int32_t* tokens, std::uint32_t extra) const noexcept;
    BlockId find(BlockId parent, const std::int32_t* tokens, std::uint32_t extra) const noexcept;
    BlockId make(BlockId parent, const std::int32_t* tokens, std::uint32_t extra);
    void unlink(BlockId id) noexcept;
    BlockId allocate();
    void add_chunk();
    void give_back(BlockId id) noexcept;
    void release(BlockId id) noexcept;
    BlockId root_of(const std::string& scope);
    std::uint32_t extra_of(std::string_view raw);
    void release_extra(std::uint32_t id) noexcept;
    void settle_extra(std::uint32_t id) noexcept;   // drops it when no block has it
    void widen(std::size_t words);

    void reserve(Source& source, std::size_t count);
    void intern_extras(const KvEvent& event);
    void store(std::uint32_t slot, const KvEvent& event, EventReport& report);
    bool fits(Source& source, const KvEvent& event, EventReport& report) const;
    bool hold(std::uint32_t slot, std::uint64_t hash, BlockId id, Medium medium, EventReport& report);
    void remove(std::uint32_t slot, const KvEvent& event, EventReport& report);
    void forget(std::uint32_t slot) noexcept;
    void credit(std::uint32_t slot, const HeldTable::Entry& entry) noexcept;

    std::uint32_t block_tokens_;
    std::uint32_t chunk_bits_;
    mutable SharedLock lock_;
    std::vector<Chunk> chunks_;
    BlockId fresh_ = 1;                    // this and all above were never given out
    BlockId free_ = 0;                     // given back: a list through Block::parent
    std::size_t num_free_ = 0;
    ChildTable children_;
    std::unordered_map<std::string, BlockId> scopes_;
    std::unordered_map<BlockId, std::string> scope_names_;
    std::unordered_map<std::string, std::uint32_t> extras_;
    std::vector<Extra> extra_list_;        // by id - 1
    std::vector<std::uint32_t> free_extras_;
    std::vector<Source> sources_;
    std::vector<std::uint64_t> trusted_;   // a bit each source
    std::size_t words_ = 1;
    std::size_t num_blocks_ = 0;
    std::vector<std::uint32_t> extras_of_event_;  // scratch of store(), empty without extra keys
};

}  // namespace poolweave
