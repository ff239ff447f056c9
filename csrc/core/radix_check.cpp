// The invariants of the radix tree, checked after every step by its tests.
#include <mutex>
#include <unordered_set>

#include "core/radix_tree.hpp"

namespace poolweave {

std::string RadixTree::check_node(NodeId id) const {
    const Node& node = nodes_[id];
    const Node& above = nodes_[node.parent];
    if (node.num_blocks == 0) return "holds no block";
    if (node.root != above.root || node.ns != above.ns || node.tenant != above.tenant) return "belongs elsewhere than its parent";
    if (node.depth != above.depth + above.num_blocks) return "has a wrong depth";
    if (node.hash != child_hash(node.parent, node.tokens)) return "has a wrong hash";
    if (find_child(node.parent, node.tokens) != id) return "is not found from its parent";
    if (above.parent == kNoNode) {
        if (!first_blocks_.contains(first_hash(node.tokens))) return "is missing among the first blocks";
    } else {
        if (node.pins > above.pins) return "has more pins than its parent";
        if (node.priority > above.priority) return "has a higher priority than its parent";
    }
    return "";
}

std::string RadixTree::check_lists() const {
    std::unordered_set<NodeId> seen;
    std::unordered_map<NodeId, std::size_t> children;
    std::size_t blocks = 0, pinned = 0, firsts = 0;
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        for (NodeId id = lists_.oldest(priority); id != kNoNode; id = nodes_[id].newer[kWholeTree]) {
            const Node& node = nodes_[id];
            const std::string name = "node " + std::to_string(id) + " ";
            if (!seen.insert(id).second) return name + "is listed twice";
            if (seen.contains(node.parent)) return name + "is newer than its parent";
            if (node.priority != priority) return name + "is in the list of another priority";
            if (const std::string fault = check_node(id); !fault.empty()) return name + fault;
            ++children[node.parent];
            firsts += nodes_[node.parent].parent == kNoNode ? 1 : 0;
            blocks += node.num_blocks;
            pinned += node.pins > 0 ? node.num_blocks : 0;
        }
    }
    for (const NodeId id : seen) {
        if (nodes_[id].num_children != children[id]) return "node " + std::to_string(id) + " miscounts its children";
    }
    for (const auto& [ns, root] : roots_) {
        if (nodes_[root].num_children != children[root] || children[root] == 0) return "a root miscounts its children";
    }
    if (blocks != num_blocks_) return "num_blocks is " + std::to_string(num_blocks_) + ", the nodes hold " + std::to_string(blocks);
    if (pinned != pinned_blocks_) return "pinned_blocks is " + std::to_string(pinned_blocks_) + ", counted " + std::to_string(pinned);
    if (seen.size() != children_.size()) return "the child table and the list differ in length";
    if (seen.size() + roots_.size() != nodes_.live()) return "nodes have leaked";
    if ((firsts > 0) != (first_blocks_.size() > 0)) return "the first blocks are miscounted";
    return "";
}

std::string RadixTree::check_tenants() const {
    std::unordered_map<const Tenant*, std::size_t> bytes, roots, listed;
    for (const auto& [ns, root] : roots_) {
        bytes[nodes_[root].tenant] += nodes_.node_bytes(0);
        ++roots[nodes_[root].tenant];
    }
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        for (NodeId id = lists_.oldest(priority); id != kNoNode; id = nodes_[id].newer[kWholeTree]) {
            bytes[nodes_[id].tenant] += nodes_.node_bytes(nodes_[id].num_blocks);
            ++listed[nodes_[id].tenant];
        }
    }
    if (roots.size() != tenants_.size()) return "a tenant without a namespace";
    for (const auto& [key, tenant] : tenants_) {
        if (tenant->bytes != bytes[tenant.get()]) return "a tenant's bytes are miscounted";
        if (tenant->num_roots != roots[tenant.get()]) return "a tenant's namespaces are miscounted";
        if (caps_tenants() && tenant->bytes > config_.max_tenant_bytes) return "a tenant is above its cap";
        std::size_t count = 0;
        for (std::size_t priority = 0; priority < kPriorities; ++priority) {
            for (NodeId id = tenant->lists.oldest(priority); id != kNoNode; id = nodes_[id].newer[kOneTenant]) ++count;
        }
        if (keeps_tenants() && count != listed[tenant.get()]) return "a tenant's list is not complete";
    }
    if (config_.max_bytes != 0 && nbytes_locked() > config_.max_bytes) return "the index is above its cap";
    return "";
}

std::string RadixTree::check() const {
    const std::unique_lock guard(lock_);
    for (const auto part : {&RadixTree::check_lists, &RadixTree::check_tenants, &RadixTree::check_order}) {
        if (std::string fault = (this->*part)(); !fault.empty()) return fault;
    }
    return "";
}

}  // namespace poolweave
