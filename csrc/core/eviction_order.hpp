// In which order an index gives its runs up: the frame of all policies but LRU, which the recency lists serve.
//
// Queued are the leaves, so that no descendant is ever orphaned: a run joins when its last child goes, with the standing
// that it had. Runs enter, are used, split and end as a whole. One pairing heap a band, linked through the states, so a
// victim is O(log n) amortised and nothing but reserve() allocates. Not thread-safe: the tree locks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/radix_node.hpp"

namespace poolweave {

// What the order knows of one run. Lower (priority, rank, stamp) goes first within a band.
struct RunState {
    double rank = 0;
    double base = 0;             // a policy's own
    std::uint64_t stamp = 0;     // the clock at the use that counts
    NodeId child = kNoNode;      // of the heap
    NodeId next = kNoNode;
    NodeId prev = kNoNode;       // the left sibling, or the parent of a first child
    std::uint32_t uses = 0;      // insertion is the first
    std::uint32_t blocks = 0;
    std::uint32_t end = 0;       // blocks from the root to its end
    std::uint8_t band = 0;
    std::uint8_t priority = 0;
    enum : std::uint8_t { kOut, kQueued, kTaken } where = kOut;
};

class EvictionOrder {
  public:
    using Names = std::span<const std::uint64_t>;

    EvictionOrder() = default;
    virtual ~EvictionOrder() = default;
    EvictionOrder(const EvictionOrder&) = delete;
    EvictionOrder& operator=(const EvictionOrder&) = delete;

    // True when enter() wants the names of the run's blocks, in order.
    virtual bool wants_names() const noexcept { return false; }

    // --- what happens to runs ---
    void reserve(std::size_t num_ids);  // throws bad_alloc and then changes nothing
    void enter(NodeId id, const Node& run, Names names) noexcept;  // a new leaf; its first use follows
    void tick() noexcept { ++clock_; }                             // before the uses of one call
    void use(NodeId id, const Node& run) noexcept;
    void split(NodeId upper, NodeId lower, std::uint32_t at) noexcept;
    bool alike(NodeId upper, NodeId lower) const noexcept;  // in all but their priorities, which the tree compares
    void join(NodeId upper, NodeId lower) noexcept;         // `upper` ends, `lower` has its blocks
    void resize(NodeId id, std::uint32_t blocks) noexcept;  // it lost blocks at its end
    void leave(NodeId id) noexcept;
    void set_leaf(NodeId id, bool leaf) noexcept;
    // A block of this run is being given up to make room. Called before the run is resized or leaves.
    virtual void give_up(NodeId, std::uint64_t /*name*/) noexcept {}

    // --- victims ---
    // Takes runs in order; at its end those that are still here are queued again.
    class Walk {
      public:
        explicit Walk(EvictionOrder& order) noexcept : order_(order) {}
        ~Walk() { order_.rewind(); }
        Walk(const Walk&) = delete;
        Walk& operator=(const Walk&) = delete;
        NodeId next() noexcept { return order_.take(); }  // kNoNode at the end

      private:
        EvictionOrder& order_;
    };

    std::size_t nbytes() const noexcept { return chunks_.size() * kChunkBytes + ghost_bytes(); }
    static constexpr std::size_t kChunk = 64;  // states, as the slab's nodes
    static constexpr std::size_t kChunkBytes = kChunk * sizeof(RunState);
    // A sentence about what is wrong, or an empty string. `num_leaves` and `num_blocks` are the tree's.
    std::string check(std::size_t num_leaves, std::size_t num_blocks) const;
    bool is_queued(NodeId id) const noexcept { return state(id).where == RunState::kQueued; }

  protected:
    static constexpr std::size_t kBands = 2;

    // The policy: set the standing of a run that enters, is used, or has another end.
    virtual void on_enter(RunState&, Names) noexcept {}
    virtual void on_use(RunState&) noexcept = 0;
    virtual void on_resize(RunState&) noexcept {}
    // The band of the next victim, one that is not empty; called while one is. May move runs first.
    virtual std::size_t choose() noexcept { return 0; }
    // The band that must be chosen: the only one with runs, or with the lower priority; kBands when both may be.
    std::size_t forced_band() const noexcept;
    virtual std::size_t ghost_bytes() const noexcept { return 0; }

    RunState& state(NodeId id) noexcept { return chunks_[id / kChunk][id % kChunk]; }
    const RunState& state(NodeId id) const noexcept { return chunks_[id / kChunk][id % kChunk]; }
    NodeId front(std::size_t band) const noexcept { return heads_[band]; }
    std::size_t band_blocks(std::size_t band) const noexcept { return band_blocks_[band]; }  // without those taken
    std::size_t all_blocks() const noexcept { return all_blocks_; }
    std::uint64_t clock() const noexcept { return clock_; }
    std::uint64_t next_stamp() noexcept { return ++clock_; }
    // Take a queued run out, let `change` it and queue it again.
    template <class Change>
    void requeue(NodeId id, Change&& change) noexcept {
        RunState& run = state(id);
        if (run.where == RunState::kQueued) unlink(id);
        band_blocks_[run.band] -= run.where == RunState::kTaken ? 0 : run.blocks;
        change(run);
        band_blocks_[run.band] += run.where == RunState::kTaken ? 0 : run.blocks;
        if (run.where == RunState::kQueued) link(id);
    }

  private:
    NodeId take() noexcept;
    void rewind() noexcept;
    bool before(NodeId a, NodeId b) const noexcept;
    NodeId meld(NodeId a, NodeId b) noexcept;
    NodeId meld_all(NodeId first) noexcept;
    void link(NodeId id) noexcept;
    void unlink(NodeId id) noexcept;
    void untake(NodeId id) noexcept;

    std::vector<std::unique_ptr<RunState[]>> chunks_;
    std::array<NodeId, kBands> heads_{};
    std::array<std::size_t, kBands> band_blocks_{};
    NodeId taken_ = kNoNode;
    std::size_t all_blocks_ = 0;
    std::size_t queued_ = 0;
    std::uint64_t clock_ = 0;
};

}  // namespace poolweave
