// Which instances hold which prompt prefixes: an edge-compressed radix tree over chained block keys (block_keys.hpp)
// whose payload is a set of instances, each with the time until which it is believed.
//
// An entry is (instance, prefix ending at a block, expiry). Entries of an instance are closed upward: whoever holds a
// block holds all before it, at least as long. An instance is a small number, its slot; names are the caller's.
// Time is passed in, in seconds, and never runs backwards inside the tree. Thread-safe: one lock, each call is atomic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/key_table.hpp"

namespace poolweave {

class PromptTree {
  public:
    static constexpr std::size_t kMaxInstances = 65'536;

    struct Stats {
        std::size_t blocks;    // distinct prefixes
        std::size_t entries;   // (instance, block) pairs, expired ones included until they are swept
        std::size_t nodes;
        std::size_t nbytes;
        std::uint64_t evicted;   // entries given up to stay under max_bytes
        std::uint64_t expired;   // entries whose time had passed when they were swept
        std::uint64_t orphans;   // insertions refused because their parent was not held
    };

    explicit PromptTree(std::size_t max_bytes = std::numeric_limits<std::size_t>::max());

    // `slot` holds the prefixes that end at each of `keys`, until `expiry`. The keys follow `parent`, or start a
    // prompt. Returns the number of keys now held: fewer than given only under the byte cap, and 0 when `slot` does
    // not hold `parent` (an orphan: an earlier event was lost). Cost O(keys); also sweeps a few old nodes.
    std::size_t insert(std::span<const std::uint64_t> keys, std::uint32_t slot, double expiry, double now,
                       std::optional<std::uint64_t> parent = std::nullopt);

    // `slot` no longer holds the prefixes that end at each of `keys`, nor what continues them; in this order. Returns
    // the entries given up.
    std::size_t remove(std::span<const std::uint64_t> keys, std::uint32_t slot, double now);

    // scores[s] = number of leading keys that slot s holds now; slots beyond scores.size() are left out.
    // Returns the number of leading keys that the tree knows at all. Cost O(keys / 8 + holders on the path).
    std::size_t match(std::span<const std::uint64_t> keys, double now, std::span<std::int32_t> scores);

    // `slot` has room for so many blocks and gives up what it used longest ago: a prefix is no longer believed once as
    // many others were entered since it last was. The default is no limit.
    void limit(std::uint32_t slot, std::uint32_t blocks);

    // Forgets all that `slot` holds. O(1): its entries are dead at once and leave memory in later sweeps.
    void retire(std::uint32_t slot);

    // Visits up to `max_nodes` nodes in turn and frees what is dead in them. Returns the nodes visited.
    std::size_t sweep(double now, std::size_t max_nodes);

    std::size_t entries(std::uint32_t slot) const;
    Stats stats() const;
    // Walks everything and throws std::logic_error where an invariant is broken.
    void check() const;

  private:
    using Index = std::uint32_t;
    static constexpr Index kNil = 0xFFFFFFFFu;
    static constexpr Index kRoot = 0;
    static constexpr std::size_t kMaxRun = 4096;  // an event names a block by its key, which is searched in its run

    // `slot` (in its life `generation`) holds the node's first `blocks` keys until `expiry`, or until it has taken in
    // its capacity of others since `stamp`.
    struct Hold {
        std::uint16_t slot;
        std::uint16_t generation;
        std::uint32_t blocks;
        std::uint32_t stamp;
        double expiry;
    };
    struct Term {  // how long a hold is believed
        std::uint32_t stamp;
        double expiry;
    };
    struct Node {
        std::vector<std::uint64_t> keys;
        std::vector<Hold> holds;  // by slot
        Index parent = kNil, child = kNil, next = kNil, prev = kNil;  // child: the first; next, prev: siblings
        Index newer = kNil, older = kNil;                             // least recently used order
        bool live = false;
    };
    struct Instance {
        std::uint16_t generation = 1;
        std::uint32_t taken_in = 0;  // blocks entered so far; wraps
        std::uint32_t capacity = 0xFFFFFFFFu;
        std::size_t entries = 0;
    };
    struct Place {  // the next key goes at keys[offset] of node, or into a child when offset is its end
        Index node = kRoot;
        std::size_t offset = 0;
    };

    // Keeps heap_bytes_ right while a node's vectors change.
    class Account;

    bool alive(const Hold& hold) const noexcept;
    bool current(const Hold& hold) const noexcept;
    Hold* find_hold(Node& node, std::uint32_t slot);
    Index find_child(Index node, std::uint64_t key) const;
    std::optional<Place> find_held(std::uint64_t key, std::uint32_t slot);
    void ensure_instance(std::uint32_t slot);
    void count(std::uint32_t slot, std::ptrdiff_t entries) noexcept;
    void take_in(std::uint32_t slot, std::size_t blocks) noexcept;

    std::size_t walk(Place& place, std::span<const std::uint64_t> keys, std::uint32_t slot, const Term& term);
    void extend(Place& place, std::span<const std::uint64_t> keys, std::uint32_t slot, const Term& term);
    std::size_t still_held(std::span<const std::uint64_t> keys, std::uint32_t slot);
    Place hold(Index index, std::size_t blocks, std::uint32_t slot, const Term& term);
    Index split(Index index, std::size_t offset);
    void append(Index index, std::span<const std::uint64_t> keys);
    std::size_t release(Index index, std::size_t keep, std::uint32_t slot);
    void drop_hold(Node& node, std::size_t at);
    void sweep_one();
    void clean(Index index);
    void prune(Index index);

    std::size_t make_room(std::size_t keys, Index keep);
    void evict(Index leaf);

    Index allocate(Index parent);
    void free_node(Index index);
    void free_subtree(Index top);
    void unlink_child(Index index);
    void link_older(Index index, Index than);
    void unlink_lru(Index index);
    void touch(Index deepest);

    static std::size_t heap_bytes(const Node& node) noexcept;
    void trim(Index index, std::size_t keep);
    std::size_t nbytes() const noexcept;
    void check_node(Index index, const std::vector<std::size_t>& age) const;

    mutable std::mutex mutex_;
    std::deque<Node> nodes_;
    std::vector<Index> free_;
    std::vector<Instance> instances_;
    KeyTable table_;
    Index newest_ = kNil, oldest_ = kNil;
    Index cursor_ = 0;
    std::size_t max_bytes_;
    std::size_t heap_bytes_ = 0;
    std::size_t entries_ = 0;
    std::uint64_t evicted_ = 0, expired_ = 0, orphans_ = 0;
    double now_ = -std::numeric_limits<double>::infinity();
};

}  // namespace poolweave
