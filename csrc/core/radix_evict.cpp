// How the radix tree shrinks: eviction, deletion, expiry; and the order in which it does.
#include <algorithm>
#include <mutex>

#include "core/error.hpp"
#include "core/radix_tree.hpp"

namespace poolweave {

void RadixTree::link_front(NodeId id) noexcept {
    lists_.push_front(nodes_, id);
    if (keeps_tenants()) nodes_[id].tenant->lists.push_front(nodes_, id);
}

void RadixTree::unlink(NodeId id) noexcept {
    lists_.remove(nodes_, id);
    if (keeps_tenants()) nodes_[id].tenant->lists.remove(nodes_, id);
}

// Gives up blocks of a leaf from its end: at most `count`, and none above one that `filter` keeps.
std::size_t RadixTree::trim(NodeId id, std::size_t count, const Evictable* filter, MissReason reason, PayloadList& out) {
    Node& node = nodes_[id];
    std::size_t left = node.num_blocks;
    const std::size_t least = left - std::min(left, count);
    while (left > least && (filter == nullptr || filter->evictable(node.payloads[left - 1]))) {
        --left;
        out.push_back(node.payloads[left]);
    }
    const std::size_t given = node.num_blocks - left;
    if (given == 0) return 0;
    remember_missing(id, left, reason);
    num_blocks_ -= given;
    gone_[static_cast<std::size_t>(reason)] += given;
    if (left == 0) {
        free_node(id);
    } else {
        nodes_.resize(node, static_cast<std::uint32_t>(left));
        if (order_) order_->resize(id, static_cast<std::uint32_t>(left));
    }
    return given;
}

// The hash of the block before block `first` of `node`; 0 when there is none.
std::uint64_t RadixTree::hash_above(const Node& node, std::size_t first) const noexcept {
    if (first > 0) return block_hash(block_at(node.tokens, first - 1));
    const Node& above = nodes_[node.parent];
    return above.num_blocks == 0 ? 0 : block_hash(block_at(above.tokens, above.num_blocks - 1));
}

// Why the blocks of this node from `first` on will be missing.
void RadixTree::remember_missing(NodeId id, std::size_t first, MissReason reason) noexcept {
    const Node& node = nodes_[id];
    std::uint64_t before = hash_above(node, first);
    for (std::size_t i = first; i < node.num_blocks; ++i) {
        const std::uint64_t hash = block_hash(block_at(node.tokens, i));
        const std::uint64_t name = miss_hash(node.ns, node.depth + i, hash, before);
        misses_.mark(name, reason);
        if (order_ && reason == MissReason::kEvicted) order_->give_up(id, name);
        before = hash;
    }
}

void RadixTree::free_node(NodeId id) noexcept {
    Node& node = nodes_[id];
    Node& above = nodes_[node.parent];
    const NodeId parent = node.parent;
    children_.erase(children_.find(node.hash, [&](NodeId candidate) { return candidate == id; }));
    if (above.parent == kNoNode) first_blocks_.uncount(first_hash(node.tokens));
    unlink(id);
    if (order_) order_->leave(id);
    nodes_.free(id);
    if (--above.num_children > 0) return;
    if (above.parent == kNoNode) {
        free_root(parent);
    } else if (order_) {
        order_->set_leaf(parent, true);
    }
}

void RadixTree::free_root(NodeId id) noexcept {
    const std::uint32_t ns = nodes_[id].ns;
    nodes_.free(id);
    roots_.erase(ns);
    release_tenant(tenant_key(ns));
}

PayloadList RadixTree::remove(Tokens tokens, std::uint32_t ns, const Evictable* filter) {
    require_tokens(tokens);
    const std::unique_lock guard(lock_);
    PayloadList out;
    const Position end = walk(tokens, ns, kBeforeAll);
    if (end.blocks == 0 || end.offset < nodes_[end.node].num_blocks) return out;
    out.reserve(end.blocks);
    NodeId id = end.node;
    while (nodes_[id].parent != kNoNode && is_victim(nodes_[id])) {
        const NodeId parent = nodes_[id].parent;
        const bool last = nodes_[parent].parent == kNoNode || nodes_[parent].num_children > 1;
        const std::size_t all = nodes_[id].num_blocks;
        if (trim(id, all, filter, MissReason::kDeleted, out) < all || last) break;
        id = parent;
    }
    return out;
}

PayloadList RadixTree::evict(std::size_t count, const Evictable* filter) {
    const std::unique_lock guard(lock_);
    PayloadList out;
    out.reserve(std::min(count, num_blocks_));
    if (order_) {
        evict_ordered(count, filter, out);
    } else {
        evict_listed(lists_, kWholeTree, count, filter, out);
    }
    return out;
}

PayloadList RadixTree::evict_tenant(std::uint32_t ns, std::size_t count, const Evictable* filter) {
    const std::unique_lock guard(lock_);
    PayloadList out;
    Tenant* const tenant = keeps_tenants() ? find_tenant(ns) : nullptr;
    if (tenant == nullptr) return out;
    out.reserve(std::min(count, num_blocks_));
    ++tenant->num_roots;  // its last block may go; the account stays until this is over
    evict_listed(tenant->lists, kOneTenant, count, filter, out);
    release_tenant(tenant_key(ns));
    return out;
}

void RadixTree::evict_listed(const RecencyLists& lists, ListKind kind, std::size_t count, const Evictable* filter, PayloadList& out) {
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        NodeId id = lists.oldest(priority);
        while (id != kNoNode && out.size() < count) {
            const NodeId next = nodes_[id].newer[kind];  // a parent is newer than its children: it comes later
            if (is_victim(nodes_[id])) trim(id, count - out.size(), filter, MissReason::kEvicted, out);
            id = next;
        }
    }
}

PayloadList RadixTree::coldest(std::size_t count, const Evictable* filter) const {
    const std::unique_lock guard(lock_);
    PayloadList out;
    if (order_) {
        coldest_ordered(count, filter, out);
    } else {
        collect_coldest(lists_, kWholeTree, count, filter, out);
    }
    return out;
}

PayloadList RadixTree::coldest_tenant(std::uint32_t ns, std::size_t count, const Evictable* filter) const {
    const std::unique_lock guard(lock_);
    PayloadList out;
    const Tenant* const tenant = keeps_tenants() ? find_tenant(ns) : nullptr;
    if (tenant != nullptr) collect_coldest(tenant->lists, kOneTenant, count, filter, out);
    return out;
}

void RadixTree::collect_coldest(const RecencyLists& lists, ListKind kind, std::size_t count, const Evictable* filter,
                                PayloadList& out) const {
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        for (NodeId id = lists.oldest(priority); id != kNoNode; id = nodes_[id].newer[kind]) {
            const Node& node = nodes_[id];
            for (std::size_t i = node.pins == 0 ? node.num_blocks : 0; i-- > 0;) {
                if (out.size() == count) return;
                if (filter == nullptr || filter->evictable(node.payloads[i])) out.push_back(node.payloads[i]);
            }
        }
    }
}

PayloadList RadixTree::expire(std::int64_t now_ns) {
    const std::unique_lock guard(lock_);
    return expire_locked(now_ns);
}

PayloadList RadixTree::expire_locked(std::int64_t now_ns) {
    PayloadList out;
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        NodeId id = lists_.oldest(priority);
        while (id != kNoNode && lapsed(nodes_[id], now_ns)) {
            const NodeId next = nodes_[id].newer[kWholeTree];
            if (is_victim(nodes_[id])) trim(id, nodes_[id].num_blocks, nullptr, MissReason::kExpired, out);
            id = next;
        }
    }
    return out;
}

PayloadList RadixTree::clear(std::uint32_t ns, MissReason reason) {
    const std::unique_lock guard(lock_);
    return clear_where(&ns, reason);
}

PayloadList RadixTree::clear_all(MissReason reason) {
    const std::unique_lock guard(lock_);
    return clear_where(nullptr, reason);
}

PayloadList RadixTree::clear_where(const std::uint32_t* ns, MissReason reason) {
    PayloadList out;
    if (ns == nullptr) out.reserve(num_blocks_);
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        NodeId id = lists_.oldest(priority);
        while (id != kNoNode) {
            const NodeId next = nodes_[id].newer[kWholeTree];
            const Node& node = nodes_[id];
            if (is_victim(node) && (ns == nullptr || node.ns == *ns)) trim(id, node.num_blocks, nullptr, reason, out);
            id = next;
        }
    }
    return out;
}

}  // namespace poolweave
