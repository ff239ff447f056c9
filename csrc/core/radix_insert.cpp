// How the radix tree grows: room under the caps, splits, new runs, merges.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/error.hpp"
#include "core/radix_tree.hpp"

namespace poolweave {

namespace {

constexpr std::size_t kShortRun = 64;  // blocks: up to this length a leaf grows in place and runs are merged

}  // namespace

void RadixTree::check_insert(Tokens tokens, Payloads payloads, const Storing& how) const {
    if (payloads.size() != whole_blocks(tokens)) {
        throw Error(Code::kConfig, std::to_string(tokens.size()) + " tokens are " + std::to_string(whole_blocks(tokens)) +
                                       " whole blocks, got " + std::to_string(payloads.size()) + " payloads");
    }
    if (how.priority >= kPriorities) {
        throw Error(Code::kConfig, "priority " + std::to_string(how.priority) + " is not below " + std::to_string(kPriorities));
    }
    require_tokens(tokens);
}

Inserted RadixTree::insert(Tokens tokens, Payloads payloads, std::uint32_t ns, Storing how) {
    check_insert(tokens, payloads, how);
    const std::unique_lock guard(lock_);
    Inserted result;
    if (config_.ttl_ns != 0) result.evicted = expire_locked(how.now_ns);
    Position end = walk(tokens, ns, kBeforeAll);  // what is still here is renewed, lapsed or not
    report_duplicates(end, payloads, result);
    const std::size_t wanted = payloads.size() - end.blocks;
    const std::size_t added = make_room(end, wanted, ns, result.evicted);
    const std::size_t total = end.blocks + added;
    NodeId deepest = end.node;
    if (added > 0) deepest = add_blocks(end, tokens.first(total << block_shift_), payloads.first(total), ns);
    if (total > 0) {
        touch(deepest, how.now_ns, how.priority);
        merge_short_runs(deepest);
    }
    result.num_new = added;
    result.num_tokens = total << block_shift_;
    inserted_ += added;
    refused_ += wanted - added;
    return result;
}

void RadixTree::report_duplicates(const Position& end, Payloads payloads, Inserted& result) {
    if (end.blocks == 0) return;
    PayloadList stored(end.blocks);
    collect(end, stored.data());
    result.duplicates.assign(payloads.begin(), payloads.begin() + static_cast<std::ptrdiff_t>(end.blocks));
    for (std::size_t i = 0; i < end.blocks; ++i) {
        if (stored[i] != payloads[i]) result.surplus.push_back(payloads[i]);
    }
    duplicate_ += end.blocks;
}

// --- room under the caps -----------------------------------------------------------------------------------

bool RadixTree::grows_in_place(const Position& end, std::size_t wanted) const noexcept {
    if (end.blocks == 0 || order_) return false;  // an order keeps apart what was not inserted together
    const Node& node = nodes_[end.node];
    return end.offset == node.num_blocks && is_victim(node) && node.num_blocks + wanted <= kShortRun;
}

// An upper bound of what nbytes_locked() grows by, at its highest point, when `wanted` blocks are added at `end`
// (0 = only the split): old and new arrays and tables exist side by side for a moment.
std::size_t RadixTree::needed_bytes(const Position& end, std::size_t wanted) const noexcept {
    if (grows_in_place(end, wanted)) return nodes_.run_bytes(nodes_[end.node].num_blocks + wanted);
    const bool splits = end.blocks > 0 && end.offset < nodes_[end.node].num_blocks;
    const bool roots = end.node == kNoNode;
    const std::size_t made = std::size_t{splits} + std::size_t{wanted > 0};
    const std::size_t tables = children_.growth_bytes(made) + first_blocks_.growth_bytes(end.blocks == 0 ? 1 : 0);
    const std::size_t slab = nodes_.growth_bytes(made + std::size_t{roots});
    const std::size_t states = order_ ? slab / sizeof(Node) * sizeof(RunState) : 0;
    return nodes_.run_bytes(wanted) + (splits ? nodes_.run_bytes(end.offset) : 0) + (roots ? kRootBytes : 0) + slab + states +
           tables;
}

std::size_t RadixTree::needed_tenant_bytes(const Position& end, std::size_t wanted) const noexcept {
    if (grows_in_place(end, wanted)) return nodes_.run_bytes(nodes_[end.node].num_blocks + wanted);
    const bool splits = end.blocks > 0 && end.offset < nodes_[end.node].num_blocks;
    return nodes_.node_bytes(wanted) + (splits ? nodes_.node_bytes(end.offset) : 0) +
           (end.node == kNoNode ? nodes_.node_bytes(0) : 0);
}

// By how many bytes the tighter cap would be passed.
std::size_t RadixTree::excess_bytes(const Position& end, std::size_t wanted, std::uint32_t ns) const noexcept {
    const auto over = [](std::size_t bytes, std::size_t cap) { return cap != 0 && bytes > cap ? bytes - cap : 0; };
    const Tenant* tenant = find_tenant(ns);
    const std::size_t used = tenant == nullptr ? 0 : tenant->bytes;
    return std::max(over(nbytes_locked() + needed_bytes(end, wanted), config_.max_bytes),
                    over(used + needed_tenant_bytes(end, wanted), config_.max_tenant_bytes));
}

// Evicts leaves from the back of `lists` while `excess()` bytes are too many.
template <class Excess>
void RadixTree::evict_while(const RecencyLists& lists, ListKind kind, PayloadList& out, Excess&& excess) {
    const std::size_t per_block = block_bytes_ + sizeof(std::uint64_t);
    if (order_ && kind == kWholeTree) {
        EvictionOrder::Walk walk(*order_);
        for (std::size_t bytes = excess(); bytes > 0; bytes = excess()) {
            const NodeId id = walk.next();
            if (id == kNoNode) return;
            if (is_victim(nodes_[id])) trim(id, bytes / per_block + 1, nullptr, MissReason::kEvicted, out);
        }
        return;
    }
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        NodeId id = lists.oldest(priority);
        while (id != kNoNode) {
            const std::size_t bytes = excess();
            if (bytes == 0) return;
            const NodeId next = nodes_[id].newer[kind];
            if (is_victim(nodes_[id])) trim(id, bytes / per_block + 1, nullptr, MissReason::kEvicted, out);
            id = next;
        }
    }
}

// Evicts others' blocks (its own path is pinned meanwhile) and says how many of the wanted blocks then fit.
std::size_t RadixTree::make_room(Position& end, std::size_t wanted, std::uint32_t ns, PayloadList& evicted) {
    if (wanted == 0 || (config_.max_bytes == 0 && !caps_tenants()) || excess_bytes(end, wanted, ns) == 0) return wanted;
    const auto over = [](std::size_t bytes, std::size_t cap) { return bytes > cap ? bytes - cap : 0; };
    if (end.blocks > 0) pin_path(end.node, true);
    if (Tenant* tenant = caps_tenants() ? find_tenant(ns) : nullptr) {
        ++tenant->num_roots;  // its last block may go; the account stays until this is over
        evict_while(tenant->lists, kOneTenant, evicted, [&] {
            return over(tenant->bytes + needed_tenant_bytes(end, wanted), config_.max_tenant_bytes);
        });
        release_tenant(tenant_key(ns));
    }
    if (config_.max_bytes != 0) {
        evict_while(lists_, kWholeTree, evicted,
                    [&] { return over(nbytes_locked() + needed_bytes(end, wanted), config_.max_bytes); });
    }
    if (end.blocks > 0) pin_path(end.node, false);
    if (end.blocks == 0) end.node = find_root(ns);  // it went with its last block
    const std::size_t per_block = block_bytes_ + sizeof(std::uint64_t);
    while (wanted > 0) {
        const std::size_t excess = excess_bytes(end, wanted, ns);
        if (excess == 0) break;
        wanted -= std::min(wanted, (excess + per_block - 1) / per_block);
    }
    return wanted;
}

// --- shape -------------------------------------------------------------------------------------------------

NodeId RadixTree::add_blocks(const Position& end, Tokens tokens, Payloads payloads, std::uint32_t ns) {
    const std::int32_t* rest = block_at(tokens.data(), end.blocks);
    const Payloads added = payloads.subspan(end.blocks);
    NodeId deepest = end.node;
    if (grows_in_place(end, added.size())) {
        append(nodes_[end.node], rest, added);
    } else if (end.blocks > 0) {
        const NodeId parent = end.offset < nodes_[end.node].num_blocks ? split(end.node, end.offset) : end.node;
        deepest = attach(parent, rest, added);
    } else {
        const NodeId root = ensure_root(ns);
        try {
            deepest = attach(root, rest, added);
        } catch (...) {
            if (nodes_[root].num_children == 0) free_root(root);
            throw;
        }
    }
    num_blocks_ += added.size();
    return deepest;
}

void RadixTree::append(Node& leaf, const std::int32_t* tokens, Payloads payloads) {
    const std::size_t before = leaf.num_blocks;
    nodes_.resize(leaf, static_cast<std::uint32_t>(before + payloads.size()));
    std::memcpy(leaf.tokens + (before << block_shift_), tokens, payloads.size() * block_bytes_);
    std::memcpy(leaf.payloads + before, payloads.data(), payloads.size_bytes());
}

NodeId RadixTree::attach(NodeId parent, const std::int32_t* tokens, Payloads payloads) {
    const bool first = nodes_[parent].parent == kNoNode;
    children_.reserve(1);
    first_blocks_.reserve(first ? 1 : 0);
    std::vector<std::uint64_t> names;
    if (order_) {
        order_->reserve(nodes_.num_ids_after_make());
        if (order_->wants_names()) names = block_names(parent, tokens, payloads.size());
    }
    const NodeId id = nodes_.make(static_cast<std::uint32_t>(payloads.size()), nodes_[parent].tenant);
    Node& node = nodes_[id];
    Node& above = nodes_[parent];
    std::memcpy(node.tokens, tokens, payloads.size() * block_bytes_);
    std::memcpy(node.payloads, payloads.data(), payloads.size_bytes());
    node.parent = parent;
    node.root = above.root;
    node.ns = above.ns;
    node.depth = above.depth + above.num_blocks;
    node.hash = child_hash(parent, tokens);
    ++above.num_children;
    children_.insert(node.hash, id);
    if (first) first_blocks_.count(first_hash(tokens));
    link_front(id);
    if (order_) {
        if (!first) order_->set_leaf(parent, false);
        order_->enter(id, node, names);
    }
    return id;
}

// Cuts a run: a new node takes the first `at` blocks and stands above the old one, which keeps its id and children.
NodeId RadixTree::split(NodeId id, std::size_t at) {
    children_.reserve(1);
    if (order_) order_->reserve(nodes_.num_ids_after_make());
    const NodeId upper_id = nodes_.make(static_cast<std::uint32_t>(at), nodes_[id].tenant);
    Node& upper = nodes_[upper_id];
    Node& lower = nodes_[id];
    std::memcpy(upper.tokens, lower.tokens, at * block_bytes_);
    std::memcpy(upper.payloads, lower.payloads, at * sizeof(std::uint64_t));
    upper.parent = lower.parent;
    upper.root = lower.root;
    upper.ns = lower.ns;
    upper.depth = lower.depth;
    upper.hash = lower.hash;
    upper.pins = lower.pins;
    upper.priority = lower.priority;
    upper.used_ns.store(lower.used_ns.load(std::memory_order_relaxed), std::memory_order_relaxed);
    upper.num_children = 1;
    children_.find(lower.hash, [&](NodeId candidate) { return candidate == id; })->value = upper_id;
    lists_.insert_newer(nodes_, upper_id, id);
    if (keeps_tenants()) lower.tenant->lists.insert_newer(nodes_, upper_id, id);
    nodes_.drop_front(lower, static_cast<std::uint32_t>(at));
    if (order_) order_->split(upper_id, id, static_cast<std::uint32_t>(at));
    lower.parent = upper_id;
    lower.depth += static_cast<std::uint32_t>(at);
    lower.hash = child_hash(upper_id, lower.tokens);
    children_.insert(lower.hash, id);
    return upper_id;
}

// Joins `id` with the run above it while that has no other child and both are short. They were touched just now, so
// one place in the recency order serves both. The lower node stays: children and pins refer to it.
void RadixTree::merge_short_runs(NodeId id) {
    for (NodeId above = nodes_[id].parent; nodes_[above].parent != kNoNode; above = nodes_[id].parent) {
        Node& upper = nodes_[above];
        Node& lower = nodes_[id];
        const std::size_t together = upper.num_blocks + lower.num_blocks;
        const bool alike = upper.num_children == 1 && upper.pins == lower.pins && upper.priority == lower.priority &&
                           (!order_ || order_->alike(above, id));
        const bool room = config_.max_bytes == 0 || nbytes_locked() + nodes_.run_bytes(together) <= config_.max_bytes;
        if (!alike || !room || together > kShortRun || !nodes_.join(upper, lower)) return;
        children_.erase(children_.find(lower.hash, [&](NodeId candidate) { return candidate == id; }));
        children_.find(upper.hash, [&](NodeId candidate) { return candidate == above; })->value = id;
        lower.parent = upper.parent;
        lower.depth = upper.depth;
        lower.hash = upper.hash;
        unlink(above);
        if (order_) order_->join(above, id);
        nodes_.free(above);
    }
}

// --- tenants -----------------------------------------------------------------------------------------------

std::uint64_t RadixTree::tenant_key(std::uint32_t ns) const noexcept {
    const auto named = tenant_names_.find(ns);
    return named == tenant_names_.end() ? std::uint64_t{1} << 32 | ns : named->second;
}

Tenant* RadixTree::find_tenant(std::uint32_t ns) const noexcept {
    const auto found = tenants_.find(tenant_key(ns));
    return found == tenants_.end() ? nullptr : found->second.get();
}

Tenant* RadixTree::ensure_tenant(std::uint32_t ns) {
    auto& slot = tenants_[tenant_key(ns)];
    if (slot == nullptr) slot = std::make_unique<Tenant>();
    return slot.get();
}

bool RadixTree::set_tenant(std::uint32_t ns, std::uint32_t tenant) {
    const std::unique_lock guard(lock_);
    if (find_root(ns) != kNoNode) return tenant_key(ns) == tenant;
    tenant_names_[ns] = tenant;
    return true;
}

std::vector<std::uint32_t> RadixTree::forget(std::span<const std::uint32_t> namespaces) {
    std::vector<std::uint32_t> gone;
    gone.reserve(namespaces.size());
    const std::unique_lock guard(lock_);
    for (const std::uint32_t ns : namespaces) {
        if (find_root(ns) != kNoNode) continue;
        tenant_names_.erase(ns);
        gone.push_back(ns);
    }
    return gone;
}

void RadixTree::release_tenant(std::uint64_t key) noexcept {
    const auto found = tenants_.find(key);
    if (--found->second->num_roots == 0) tenants_.erase(found);
}

NodeId RadixTree::ensure_root(std::uint32_t ns) {
    if (const NodeId root = find_root(ns); root != kNoNode) return root;
    Tenant* tenant = ensure_tenant(ns);
    NodeId root = kNoNode;
    try {
        root = nodes_.make(0, tenant);
        roots_[ns] = root;
    } catch (...) {
        if (root != kNoNode) nodes_.free(root);
        if (tenant->num_roots == 0) tenants_.erase(tenant_key(ns));
        throw;
    }
    ++tenant->num_roots;
    nodes_[root].root = root;
    nodes_[root].ns = ns;
    return root;
}

}  // namespace poolweave
