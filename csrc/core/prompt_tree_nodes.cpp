// The nodes of the prompt tree: where they live, in which order they are given up, and what must always hold.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/prompt_tree.hpp"
#include "core/prompt_tree_account.hpp"

namespace poolweave {

namespace {

constexpr std::size_t kAllocation = 16;  // what malloc adds to each allocation

void require(bool condition, const char* what) {
    if (!condition) throw std::logic_error(std::string("prompt tree: ") + what);
}

template <typename T>
std::size_t bytes_of(const std::vector<T>& vector) noexcept {
    return vector.capacity() == 0 ? 0 : vector.capacity() * sizeof(T) + kAllocation;
}

}  // namespace

// --- memory ----------------------------------------------------------------------------------------------

std::size_t PromptTree::heap_bytes(const Node& node) noexcept { return bytes_of(node.keys) + bytes_of(node.holds); }

std::size_t PromptTree::nbytes() const noexcept {
    return nodes_.size() * sizeof(Node) + heap_bytes_ + bytes_of(free_) + bytes_of(instances_) + table_.nbytes();
}

// Evicts what was used longest ago until `keys` more fit under the cap, never `keep` or what leads to it.
// Returns how many of them fit.
std::size_t PromptTree::make_room(std::size_t keys, Index keep) {
    if (max_bytes_ == std::numeric_limits<std::size_t>::max()) return keys;
    // New nodes (a split and the end), their vectors, and the slack of a run that grows in place.
    const std::size_t run = nodes_[keep].keys.size() * sizeof(std::uint64_t) / 4;
    const std::size_t fixed = (2 + keys / kMaxRun) * (sizeof(Node) + 4 * sizeof(Hold) + 4 * kAllocation) + run;
    const auto fits = [&](std::size_t n) {
        const std::size_t grown = table_.nbytes_with(n) - table_.nbytes();
        return nbytes() + fixed + n * sizeof(std::uint64_t) + grown <= max_bytes_;
    };
    // `keep` was touched last, deepest first: when it is the oldest, only its own path is left.
    while (!fits(keys) && oldest_ != kNil && oldest_ != keep) evict(oldest_);
    if (fits(keys)) return keys;
    std::size_t low = 0, high = keys;  // fits(low) or low == 0
    while (high - low > 1) {
        const std::size_t middle = low + (high - low) / 2;
        (fits(middle) ? low : high) = middle;
    }
    return low;
}

void PromptTree::evict(Index leaf) {
    for (const Hold& held : nodes_[leaf].holds) {
        if (current(held)) evicted_ += held.blocks;
    }
    free_node(leaf);
}

// --- dead entries ----------------------------------------------------------------------------------------

void PromptTree::sweep_one() {
    cursor_ = cursor_ + 1 < nodes_.size() ? cursor_ + 1 : 1;
    if (cursor_ < nodes_.size() && nodes_[cursor_].live) clean(cursor_);
}

void PromptTree::clean(Index index) {
    Node& node = nodes_[index];
    const auto dead = [this](const Hold& held) { return !alive(held); };
    for (const Hold& held : node.holds) {
        if (alive(held) || !current(held)) continue;
        count(held.slot, -static_cast<std::ptrdiff_t>(held.blocks));
        expired_ += held.blocks;
    }
    if (std::any_of(node.holds.begin(), node.holds.end(), dead)) {
        const Account account(*this, node);
        std::erase_if(node.holds, dead);
        if (node.holds.capacity() > 4 * node.holds.size()) node.holds.shrink_to_fit();
    }
    prune(index);  // also where all live: a dead hold may have been taken up again by a shorter one
}

// Frees the end of a run that nobody holds, and with it all that continues it: by closure, nobody holds that either.
void PromptTree::prune(Index index) {
    const Node& node = nodes_[index];
    std::size_t held = 0;
    for (const Hold& h : node.holds) held = std::max<std::size_t>(held, h.blocks);
    if (held == node.keys.size()) return;
    while (node.child != kNil) free_subtree(node.child);
    if (held == 0) {
        free_node(index);
    } else {
        trim(index, held);
    }
}

void PromptTree::trim(Index index, std::size_t keep) {
    Node& node = nodes_[index];
    const Account account(*this, node);
    for (std::size_t i = keep; i < node.keys.size(); ++i) table_.erase(node.keys[i], index);
    node.keys.resize(keep);
    node.keys.shrink_to_fit();
}

// --- nodes -----------------------------------------------------------------------------------------------

// A new empty node, first among the children of `parent` and used just before it.
PromptTree::Index PromptTree::allocate(Index parent) {
    Index index;
    if (free_.empty()) {
        index = static_cast<Index>(nodes_.size());
        nodes_.emplace_back();
    } else {
        index = free_.back();
        free_.pop_back();
    }
    Node& node = nodes_[index];
    node.live = true;
    node.parent = parent;
    node.next = nodes_[parent].child;
    if (node.next != kNil) nodes_[node.next].prev = index;
    nodes_[parent].child = index;
    link_older(index, parent);
    return index;
}

// Frees a node without children.
void PromptTree::free_node(Index index) {
    Node& node = nodes_[index];
    for (const Hold& held : node.holds) {
        if (current(held)) count(held.slot, -static_cast<std::ptrdiff_t>(held.blocks));
    }
    for (const std::uint64_t key : node.keys) table_.erase(key, index);
    heap_bytes_ -= heap_bytes(node);
    unlink_child(index);
    unlink_lru(index);
    node = Node{};
    free_.push_back(index);
}

void PromptTree::free_subtree(Index top) {
    std::vector<Index> order{top};
    for (std::size_t i = 0; i < order.size(); ++i) {
        for (Index child = nodes_[order[i]].child; child != kNil; child = nodes_[child].next) order.push_back(child);
    }
    while (!order.empty()) {
        free_node(order.back());
        order.pop_back();
    }
}

void PromptTree::unlink_child(Index index) {
    Node& node = nodes_[index];
    if (node.prev != kNil) {
        nodes_[node.prev].next = node.next;
    } else {
        nodes_[node.parent].child = node.next;
    }
    if (node.next != kNil) nodes_[node.next].prev = node.prev;
    node.next = node.prev = kNil;
}

// Puts a node just behind `than` in order of use; behind the root means in front of all.
void PromptTree::link_older(Index index, Index than) {
    Node& node = nodes_[index];
    node.newer = than == kRoot ? kNil : than;
    node.older = than == kRoot ? newest_ : nodes_[than].older;
    (node.newer == kNil ? newest_ : nodes_[node.newer].older) = index;
    (node.older == kNil ? oldest_ : nodes_[node.older].newer) = index;
}

void PromptTree::unlink_lru(Index index) {
    const Node& node = nodes_[index];
    (node.newer == kNil ? newest_ : nodes_[node.newer].older) = node.older;
    (node.older == kNil ? oldest_ : nodes_[node.older].newer) = node.newer;
}

// Marks a path as used, deepest node first: a parent stays nearer the front than its children, the oldest is a leaf.
void PromptTree::touch(Index deepest) {
    for (Index i = deepest; i != kRoot; i = nodes_[i].parent) {
        if (i == newest_) continue;
        unlink_lru(i);
        link_older(i, kRoot);
    }
}

// --- invariants ------------------------------------------------------------------------------------------

void PromptTree::check() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> age(nodes_.size(), 0);  // 1 = newest
    std::size_t linked = 0;
    for (Index i = newest_, newer = kNil; i != kNil; newer = i, i = nodes_[i].older) {
        require(nodes_[i].live && nodes_[i].newer == newer, "the order of use is broken");
        age[i] = ++linked;
        if (nodes_[i].older == kNil) require(i == oldest_, "the oldest node is another");
    }
    std::size_t keys = 0, heap = 0, entries = 0, live = 0;
    std::vector<std::size_t> held(instances_.size(), 0);
    for (Index i = 1; i < nodes_.size(); ++i) {
        if (!nodes_[i].live) continue;
        check_node(i, age);
        ++live;
        keys += nodes_[i].keys.size();
        heap += heap_bytes(nodes_[i]);
        for (const Hold& h : nodes_[i].holds) {
            if (current(h)) held[h.slot] += h.blocks;
        }
    }
    for (std::size_t slot = 0; slot < held.size(); ++slot) {
        require(held[slot] == instances_[slot].entries, "an instance's entries are miscounted");
        entries += held[slot];
    }
    require(live == linked && live + free_.size() + 1 == nodes_.size(), "nodes are lost");
    require(keys == table_.size(), "the key table and the runs differ in size");
    require(heap == heap_bytes_ && entries == entries_, "bytes or entries are miscounted");
    require(nbytes() <= max_bytes_, "the byte cap is exceeded");
}

void PromptTree::check_node(Index index, const std::vector<std::size_t>& age) const {
    const Node& node = nodes_[index];
    const Node& parent = nodes_[node.parent];
    require(!node.keys.empty() && node.keys.size() <= kMaxRun, "a run has an impossible length");
    require(parent.live && age[node.parent] < age[index], "a parent is used less recently than its child");
    require(node.prev == kNil ? parent.child == index : nodes_[node.prev].next == index, "siblings are broken");
    for (const std::uint64_t key : node.keys) {
        require(table_.find(key, [&](Index i) { return i == index; }) == index, "a key is not in the table");
    }
    for (std::size_t i = 0; i < node.holds.size(); ++i) {
        const Hold& held = node.holds[i];
        require(held.blocks > 0 && held.blocks <= node.keys.size(), "a hold is longer than its run");
        require(i == 0 || node.holds[i - 1].slot < held.slot, "holds are out of order");
        if (!alive(held) || node.parent == kRoot) continue;
        const auto above = std::find_if(parent.holds.begin(), parent.holds.end(),
                                        [&](const Hold& h) { return h.slot == held.slot; });
        require(above != parent.holds.end() && alive(*above) && above->blocks == parent.keys.size() &&
                    above->expiry >= held.expiry &&
                    instances_[held.slot].taken_in - above->stamp <= instances_[held.slot].taken_in - held.stamp,
                "a block is held without all before it");
    }
}

}  // namespace poolweave
