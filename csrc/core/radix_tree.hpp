// An exact prefix index: from prompt tokens to one 64-bit payload a block, path-compressed at block granularity.
//
// Tokens are always compared, never only their hashes. Every namespace has a root of its own. Recency is kept per
// run of blocks, and what is touched together is kept together: a path moves to the front deepest run first, so a
// parent is always nearer to the front than its children, and the first leaf from the back is the victim.
//
// Threads: any number of match() calls run in parallel; everything else is exclusive. Each call is atomic.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/child_table.hpp"
#include "core/evictable.hpp"
#include "core/eviction_policies.hpp"
#include "core/miss_reasons.hpp"
#include "core/radix_node.hpp"
#include "core/read_log.hpp"
#include "core/shared_lock.hpp"

namespace poolweave {

using Tokens = std::span<const std::int32_t>;
using Payloads = std::span<const std::uint64_t>;
using PayloadList = std::vector<std::uint64_t>;

struct RadixConfig {
    std::uint32_t block_tokens = 16;      // a power of two
    std::size_t max_bytes = 0;            // of all tables and runs together; 0 = no cap
    std::size_t max_tenant_bytes = 0;     // of one tenant's runs; 0 = no cap
    bool keep_tenants = false;            // keep an order of victims by tenant also without that cap
    std::int64_t ttl_ns = 0;              // since the last touch; 0 = for ever
    std::uint64_t seed = 0;               // of the bucket hashes
    std::string eviction = "lru";         // the order of victims; a tenant's own cap always takes its least recently used
    RecomputeCost cost = {};              // for "cost-aware"
    bool explains_misses = true;          // remember what went, at 256 KiB a tree; otherwise all was never stored
};

struct Match {
    std::size_t num_tokens = 0;           // a multiple of block_tokens
    PayloadList blocks;
    MissReason miss_reason = MissReason::kNone;
    NodeId pinned = kNoNode;              // for RadixTree::unpin
};

struct Inserted {
    std::size_t num_tokens = 0;           // indexed along this path now; less than given only under a byte cap
    std::size_t num_new = 0;              // blocks taken by this call
    PayloadList duplicates;               // given, not taken: these blocks were indexed already
    PayloadList surplus;                  // those duplicates for which the index holds another payload
    PayloadList evicted;                  // given up by the index to stay under its caps or because they lapsed
};

struct RadixStats {
    std::size_t num_blocks, num_nodes, num_namespaces, pinned_blocks, nbytes;
    std::uint64_t lookups, asked_blocks, hit_blocks;
    std::uint64_t misses[kMissReasons];   // lookups by the reason for which they stopped
    std::uint64_t inserted_blocks, duplicate_blocks, refused_blocks;  // refused: no room under a cap
    std::uint64_t gone[kMissReasons];     // blocks by the reason for which they left
};

// Throws Error(kConfig) naming the first negative one.
void require_tokens(Tokens tokens);

// How a lookup is to be made: at which time, and whether it counts as a use.
struct Lookup {
    std::int64_t now_ns = 0;
    bool pin = false;
    bool touch = true;
};

// Under which conditions an insert is made.
struct Storing {
    std::int64_t now_ns = 0;
    std::uint8_t priority = 0;            // lower ones are evicted first; a prefix inherits the highest of its prompts
};

class RadixTree {
  public:
    explicit RadixTree(const RadixConfig& config);
    RadixTree(const RadixTree&) = delete;
    RadixTree& operator=(const RadixTree&) = delete;
    ~RadixTree() = default;

    Match match(Tokens tokens, std::uint32_t ns, Lookup how = {});
    void unpin(NodeId pinned);

    // `payloads` has one entry a whole block of `tokens`. Throws Error(kConfig) when not, or for a negative token.
    Inserted insert(Tokens tokens, Payloads payloads, std::uint32_t ns, Storing how = {});

    // Gives up the blocks of this prompt from its end upward while no other prompt runs through them.
    PayloadList remove(Tokens tokens, std::uint32_t ns, const Evictable* filter = nullptr);
    // Up to `count` blocks, leaves of the lowest priority first, in the policy's order, each from its end.
    PayloadList evict(std::size_t count, const Evictable* filter = nullptr);
    // The blocks that evict() would come to first, without removing them and without the rule that leaves go first.
    PayloadList coldest(std::size_t count, const Evictable* filter = nullptr) const;
    // The same two among the blocks of the tenant of `ns`, always least recently used first. Needs `keep_tenants`.
    PayloadList evict_tenant(std::uint32_t ns, std::size_t count, const Evictable* filter = nullptr);
    PayloadList coldest_tenant(std::uint32_t ns, std::size_t count, const Evictable* filter = nullptr) const;
    // Everything that was not touched for the time to live.
    PayloadList expire(std::int64_t now_ns);
    // Everything of one namespace, or of all, that is not pinned.
    PayloadList clear(std::uint32_t ns, MissReason reason = MissReason::kDeleted);
    PayloadList clear_all(MissReason reason = MissReason::kDeleted);

    // Later lookups that stop at a block of `tokens` which is not indexed report `reason`.
    void mark(Tokens tokens, std::uint32_t ns, MissReason reason);
    // Accounts `ns` to `tenant`; until then each namespace is a tenant of its own. False, and without effect, while
    // the namespace holds blocks on another account.
    bool set_tenant(std::uint32_t ns, std::uint32_t tenant);
    // Those of `namespaces` that hold nothing: each is a tenant of its own again, and nothing is kept of it.
    std::vector<std::uint32_t> forget(std::span<const std::uint32_t> namespaces);

    std::uint32_t block_tokens() const noexcept { return config_.block_tokens; }
    std::size_t num_blocks() const;
    std::size_t tenant_bytes(std::uint32_t ns) const;
    RadixStats stats() const;
    const std::string& eviction() const noexcept { return config_.eviction; }
    // Checks all invariants; a sentence about the first one that does not hold, or an empty string. O(tree).
    std::string check() const;

    // True when no call would wait now. A hint: callers that hold a lock of their own let go of it first when false.
    bool idle() const noexcept { return lock_.idle(); }

  private:
    // Where a walk along tokens ended: `offset` blocks into `node`, `blocks` from the root.
    struct Position {
        NodeId node = kNoNode;
        std::size_t offset = 0;
        std::size_t blocks = 0;
        bool lapsed = false;              // stopped at a run whose time to live is over
    };

    // Tokens and bucket hashes (radix_tree.cpp).
    std::size_t whole_blocks(Tokens tokens) const noexcept { return tokens.size() >> block_shift_; }
    const std::int32_t* block_at(const std::int32_t* tokens, std::size_t i) const noexcept { return tokens + (i << block_shift_); }
    bool same_blocks(const std::int32_t* a, const std::int32_t* b, std::size_t count) const noexcept;
    std::size_t common_blocks(const std::int32_t* a, const std::int32_t* b, std::size_t limit) const noexcept;
    std::uint32_t child_hash(NodeId parent, const std::int32_t* block) const noexcept;
    std::uint32_t first_hash(const std::int32_t* block) const noexcept;
    std::uint64_t block_hash(const std::int32_t* block) const noexcept;
    static std::uint64_t miss_hash(std::uint32_t ns, std::size_t depth, std::uint64_t block, std::uint64_t before) noexcept;

    // Lookup (radix_tree.cpp).
    NodeId find_root(std::uint32_t ns) const noexcept;
    NodeId find_child(NodeId parent, const std::int32_t* block) const noexcept;
    Position walk(Tokens tokens, std::uint32_t ns, std::int64_t now_ns) const noexcept;
    Match match_locked(Tokens tokens, std::uint32_t ns, const Lookup& how);
    Match match_pinned(Tokens tokens, std::uint32_t ns, const Lookup& how);
    void collect(const Position& end, std::uint64_t* payloads) const noexcept;
    MissReason why(Tokens tokens, std::uint32_t ns, const Position& end) const noexcept;
    bool lapsed(const Node& node, std::int64_t now_ns) const noexcept;
    void touch(NodeId deepest, std::int64_t now_ns, std::uint8_t priority) noexcept;
    void use_path(NodeId deepest, std::int64_t now_ns) noexcept;
    static void use(Node& node, std::int64_t now_ns) noexcept;
    void settle() noexcept;

    // Growth (radix_insert.cpp).
    void check_insert(Tokens tokens, Payloads payloads, const Storing& how) const;
    void report_duplicates(const Position& end, Payloads payloads, Inserted& result);
    bool grows_in_place(const Position& end, std::size_t wanted) const noexcept;
    std::size_t needed_bytes(const Position& end, std::size_t wanted) const noexcept;
    std::size_t needed_tenant_bytes(const Position& end, std::size_t wanted) const noexcept;
    std::size_t excess_bytes(const Position& end, std::size_t wanted, std::uint32_t ns) const noexcept;
    template <class Excess>
    void evict_while(const RecencyLists& lists, ListKind kind, PayloadList& out, Excess&& excess);
    std::vector<std::uint64_t> block_names(NodeId parent, const std::int32_t* tokens, std::size_t count) const;
    std::size_t make_room(Position& end, std::size_t wanted, std::uint32_t ns, PayloadList& evicted);
    NodeId add_blocks(const Position& end, Tokens tokens, Payloads payloads, std::uint32_t ns);
    void append(Node& leaf, const std::int32_t* tokens, Payloads payloads);
    NodeId attach(NodeId parent, const std::int32_t* tokens, Payloads payloads);
    NodeId split(NodeId id, std::size_t at);
    void merge_short_runs(NodeId id);
    NodeId ensure_root(std::uint32_t ns);
    std::uint64_t tenant_key(std::uint32_t ns) const noexcept;
    Tenant* find_tenant(std::uint32_t ns) const noexcept;
    Tenant* ensure_tenant(std::uint32_t ns);
    void release_tenant(std::uint64_t key) noexcept;

    // Removal (radix_evict.cpp).
    std::size_t trim(NodeId id, std::size_t count, const Evictable* filter, MissReason reason, PayloadList& out);
    void remember_missing(NodeId id, std::size_t first, MissReason reason) noexcept;
    std::uint64_t hash_above(const Node& node, std::size_t first) const noexcept;
    void free_node(NodeId id) noexcept;
    void free_root(NodeId id) noexcept;
    PayloadList expire_locked(std::int64_t now_ns);
    PayloadList clear_where(const std::uint32_t* ns, MissReason reason);
    void evict_ordered(std::size_t count, const Evictable* filter, PayloadList& out);
    void coldest_ordered(std::size_t count, const Evictable* filter, PayloadList& out) const;
    bool is_victim(const Node& node) const noexcept { return node.num_children == 0 && node.pins == 0; }
    void pin_path(NodeId deepest, bool pin) noexcept;

    void link_front(NodeId id) noexcept;
    void unlink(NodeId id) noexcept;
    bool caps_tenants() const noexcept { return config_.max_tenant_bytes != 0; }
    bool keeps_tenants() const noexcept { return config_.keep_tenants || caps_tenants(); }
    void collect_coldest(const RecencyLists& lists, ListKind kind, std::size_t count, const Evictable* filter, PayloadList& out) const;
    void evict_listed(const RecencyLists& lists, ListKind kind, std::size_t count, const Evictable* filter, PayloadList& out);
    std::size_t nbytes_locked() const noexcept;
    std::string check_node(NodeId id) const;
    std::string check_lists() const;
    std::string check_tenants() const;
    std::string check_order() const;

    // Who holds it alone finds every use in the recency lists.
    class Lock : public SharedLock {
      public:
        explicit Lock(RadixTree& tree) noexcept : tree_(tree) {}
        void lock() {
            SharedLock::lock();
            tree_.settle();
        }

      private:
        RadixTree& tree_;
    };

    static constexpr std::int64_t kBeforeAll = std::numeric_limits<std::int64_t>::min();
    static constexpr std::size_t kRootBytes = 256;  // what a namespace takes in the maps below

    RadixConfig config_;
    std::uint32_t block_shift_;
    std::size_t block_bytes_;

    mutable Lock lock_{*this};
    NodeSlab nodes_;
    ChildTable children_;
    ChildTable first_blocks_;             // hash of a namespace's first block -> how often it is one
    MissMemory misses_;
    std::unique_ptr<EvictionOrder> order_;  // none for LRU, which is the order of lists_
    std::unordered_map<std::uint32_t, NodeId> roots_;
    std::unordered_map<std::uint32_t, std::uint32_t> tenant_names_;          // namespaces with a tenant of their own choice
    std::unordered_map<std::uint64_t, std::unique_ptr<Tenant>> tenants_;     // by tenant_key()
    std::size_t num_blocks_ = 0;
    std::size_t pinned_blocks_ = 0;
    std::uint64_t inserted_ = 0, duplicate_ = 0, refused_ = 0;
    std::uint64_t gone_[kMissReasons] = {};  // blocks by the reason for which they left

    RecencyLists lists_{kWholeTree};
    ReadLog reads_;                       // by match(): not in the lists yet
};

}  // namespace poolweave
