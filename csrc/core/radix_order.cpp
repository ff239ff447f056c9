// Victims of the radix tree in the order of a policy; see eviction_order.hpp. LRU goes by the recency lists instead.
#include <unordered_map>

#include "core/radix_tree.hpp"

namespace poolweave {

// What the blocks after `parent` will be known by when they are missing.
std::vector<std::uint64_t> RadixTree::block_names(NodeId parent, const std::int32_t* tokens, std::size_t count) const {
    const Node& above = nodes_[parent];
    std::vector<std::uint64_t> names(count);
    std::uint64_t before = above.num_blocks == 0 ? 0 : block_hash(block_at(above.tokens, above.num_blocks - 1));
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t hash = block_hash(block_at(tokens, i));
        names[i] = miss_hash(above.ns, above.depth + above.num_blocks + i, hash, before);
        before = hash;
    }
    return names;
}

void RadixTree::evict_ordered(std::size_t count, const Evictable* filter, PayloadList& out) {
    EvictionOrder::Walk walk(*order_);
    while (out.size() < count) {
        const NodeId id = walk.next();
        if (id == kNoNode) return;
        if (is_victim(nodes_[id])) trim(id, count - out.size(), filter, MissReason::kEvicted, out);
    }
}

// As if each run that the order comes to were gone, also one that may not go: its parent is a leaf then.
void RadixTree::coldest_ordered(std::size_t count, const Evictable* filter, PayloadList& out) const {
    struct Bared {
        ~Bared() {
            for (const NodeId id : ids) order.set_leaf(id, false);
        }
        EvictionOrder& order;
        std::vector<NodeId> ids;
    };
    std::unordered_map<NodeId, std::uint32_t> gone;  // children, by parent
    EvictionOrder::Walk walk(*order_);
    Bared bared{*order_, {}};
    while (out.size() < count) {
        const NodeId id = walk.next();
        if (id == kNoNode) return;
        const Node& node = nodes_[id];
        for (std::size_t i = node.pins == 0 ? node.num_blocks : 0; i-- > 0 && out.size() < count;) {
            if (filter == nullptr || filter->evictable(node.payloads[i])) out.push_back(node.payloads[i]);
        }
        const Node& above = nodes_[node.parent];
        if (above.parent == kNoNode || ++gone[node.parent] < above.num_children) continue;
        bared.ids.push_back(node.parent);
        order_->set_leaf(node.parent, true);
    }
}

std::string RadixTree::check_order() const {
    if (!order_) return "";
    std::size_t leaves = 0;
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        for (NodeId id = lists_.oldest(priority); id != kNoNode; id = nodes_[id].newer[kWholeTree]) {
            const bool leaf = nodes_[id].num_children == 0;
            leaves += leaf;
            if (order_->is_queued(id) != leaf) return "node " + std::to_string(id) + " is queued and no leaf, or a leaf and not queued";
        }
    }
    return order_->check(leaves, num_blocks_);
}

}  // namespace poolweave
