#include "core/eviction_order.hpp"

#include <tuple>
#include <utility>

namespace poolweave {

// --- what happens to runs ----------------------------------------------------------------------------------

void EvictionOrder::reserve(std::size_t num_ids) {
    while (chunks_.size() * kChunk < num_ids) chunks_.push_back(std::make_unique<RunState[]>(kChunk));
}

void EvictionOrder::enter(NodeId id, const Node& run, Names names) noexcept {
    RunState& fresh = state(id);
    fresh = RunState{};
    fresh.blocks = run.num_blocks;
    fresh.end = run.depth + run.num_blocks;
    fresh.priority = run.priority;
    on_enter(fresh, names);
    all_blocks_ += fresh.blocks;
    band_blocks_[fresh.band] += fresh.blocks;
    set_leaf(id, true);
}

void EvictionOrder::use(NodeId id, const Node& run) noexcept {
    requeue(id, [&](RunState& used) {
        used.priority = run.priority;
        ++used.uses;
        on_use(used);
    });
}

void EvictionOrder::split(NodeId upper, NodeId lower, std::uint32_t at) noexcept {
    RunState& above = state(upper);
    RunState& below = state(lower);
    above = below;
    above.where = RunState::kOut;
    above.child = above.next = above.prev = kNoNode;
    above.blocks = at;
    below.blocks -= at;
    above.end = below.end - below.blocks;
    on_resize(above);
}

bool EvictionOrder::alike(NodeId upper, NodeId lower) const noexcept {
    const RunState& a = state(upper);
    const RunState& b = state(lower);
    return std::tie(a.band, a.stamp, a.uses, a.base) == std::tie(b.band, b.stamp, b.uses, b.base);
}

void EvictionOrder::join(NodeId upper, NodeId lower) noexcept {
    state(lower).blocks += state(upper).blocks;
    state(upper) = RunState{};
}

void EvictionOrder::resize(NodeId id, std::uint32_t blocks) noexcept {
    all_blocks_ -= state(id).blocks - blocks;
    requeue(id, [&](RunState& run) {
        run.end -= run.blocks - blocks;
        run.blocks = blocks;
        on_resize(run);
    });
}

void EvictionOrder::leave(NodeId id) noexcept {
    RunState& run = state(id);
    all_blocks_ -= run.blocks;
    set_leaf(id, false);
    band_blocks_[run.band] -= run.blocks;
    run = RunState{};
}

void EvictionOrder::set_leaf(NodeId id, bool leaf) noexcept {
    RunState& run = state(id);
    if (leaf) {
        run.where = RunState::kQueued;
        link(id);
        return;
    }
    if (run.where == RunState::kTaken) untake(id);
    else if (run.where == RunState::kQueued) unlink(id);
    run.where = RunState::kOut;
}

// --- victims -----------------------------------------------------------------------------------------------

std::size_t EvictionOrder::forced_band() const noexcept {
    if (heads_[0] == kNoNode) return 1;
    if (heads_[1] == kNoNode) return 0;
    const std::uint8_t first = state(heads_[0]).priority;
    const std::uint8_t second = state(heads_[1]).priority;
    if (first == second) return kBands;
    return first < second ? 0 : 1;
}

NodeId EvictionOrder::take() noexcept {
    if (heads_[0] == kNoNode && heads_[1] == kNoNode) return kNoNode;
    const std::size_t band = choose();
    const NodeId id = heads_[band];
    unlink(id);
    RunState& run = state(id);
    run.where = RunState::kTaken;
    band_blocks_[band] -= run.blocks;
    run.prev = kNoNode;
    run.next = taken_;
    if (taken_ != kNoNode) state(taken_).prev = id;
    taken_ = id;
    return id;
}

void EvictionOrder::untake(NodeId id) noexcept {
    RunState& run = state(id);
    (run.prev == kNoNode ? taken_ : state(run.prev).next) = run.next;
    if (run.next != kNoNode) state(run.next).prev = run.prev;
    run.next = run.prev = kNoNode;
    band_blocks_[run.band] += run.blocks;
}

void EvictionOrder::rewind() noexcept {
    while (taken_ != kNoNode) {
        const NodeId id = taken_;
        untake(id);
        state(id).where = RunState::kQueued;
        link(id);
    }
}

// --- the heaps ---------------------------------------------------------------------------------------------

bool EvictionOrder::before(NodeId a, NodeId b) const noexcept {
    const RunState& one = state(a);
    const RunState& other = state(b);
    return std::tie(one.priority, one.rank, one.stamp, a) < std::tie(other.priority, other.rank, other.stamp, b);
}

// The later of two roots becomes the first child of the earlier one.
NodeId EvictionOrder::meld(NodeId a, NodeId b) noexcept {
    if (a == kNoNode || b == kNoNode) return a == kNoNode ? b : a;
    if (before(b, a)) std::swap(a, b);
    RunState& root = state(a);
    RunState& child = state(b);
    child.next = root.child;
    child.prev = a;
    if (root.child != kNoNode) state(root.child).prev = b;
    root.child = b;
    return a;
}

// One root out of a list of siblings: in pairs from the left, then together from the right.
NodeId EvictionOrder::meld_all(NodeId first) noexcept {
    NodeId pairs = kNoNode;  // the last pair first, linked by `next`
    while (first != kNoNode) {
        const NodeId a = first;
        const NodeId b = state(a).next;
        first = b == kNoNode ? kNoNode : state(b).next;
        state(a).next = state(a).prev = kNoNode;
        if (b != kNoNode) state(b).next = state(b).prev = kNoNode;
        const NodeId pair = meld(a, b);
        state(pair).next = pairs;
        pairs = pair;
    }
    NodeId root = kNoNode;
    while (pairs != kNoNode) {
        const NodeId pair = pairs;
        pairs = state(pair).next;
        state(pair).next = kNoNode;
        root = meld(root, pair);
    }
    return root;
}

void EvictionOrder::link(NodeId id) noexcept {
    RunState& run = state(id);
    run.child = run.next = run.prev = kNoNode;
    heads_[run.band] = meld(heads_[run.band], id);
    ++queued_;
}

void EvictionOrder::unlink(NodeId id) noexcept {
    RunState& run = state(id);
    NodeId& head = heads_[run.band];
    const NodeId children = meld_all(run.child);
    if (head == id) {
        head = children;
    } else {
        RunState& left = state(run.prev);
        (left.child == id ? left.child : left.next) = run.next;
        if (run.next != kNoNode) state(run.next).prev = run.prev;
        head = meld(head, children);
    }
    run.child = run.next = run.prev = kNoNode;
    --queued_;
}

std::string EvictionOrder::check(std::size_t num_leaves, std::size_t num_blocks) const {
    if (queued_ != num_leaves) return "the order queues " + std::to_string(queued_) + " runs of " + std::to_string(num_leaves) + " leaves";
    if (taken_ != kNoNode) return "a walk was not ended";
    const std::size_t counted = band_blocks_[0] + band_blocks_[1];
    if (counted != num_blocks || all_blocks_ != num_blocks) return "the order counts its blocks wrong";
    return "";
}

}  // namespace poolweave
