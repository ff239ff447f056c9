#include "core/prompt_tree.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/prompt_tree_account.hpp"

namespace poolweave {

namespace {

constexpr std::size_t kSweepPerInsert = 4;

std::size_t common_prefix(std::span<const std::uint64_t> a, std::span<const std::uint64_t> b) noexcept {
    const std::size_t n = std::min(a.size(), b.size());
    return static_cast<std::size_t>(std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin());
}

}  // namespace

PromptTree::PromptTree(std::size_t max_bytes) : max_bytes_(max_bytes) {
    nodes_.emplace_back().live = true;  // the root: no key, no hold
}

// --- public calls ----------------------------------------------------------------------------------------

std::size_t PromptTree::insert(std::span<const std::uint64_t> keys, std::uint32_t slot, double expiry, double now,
                               std::optional<std::uint64_t> parent) {
    const std::lock_guard lock(mutex_);
    ensure_instance(slot);
    now_ = std::max(now_, now);
    if (keys.empty() || expiry <= now_) return 0;
    for (std::size_t i = 0; i < kSweepPerInsert; ++i) sweep_one();
    const Term term{instances_[slot].taken_in, expiry};
    Place place;
    if (parent) {
        const std::optional<Place> held = find_held(*parent, slot);
        if (!held) {
            ++orphans_;
            return 0;
        }
        place = hold(held->node, held->offset, slot, term);
        // What is above lives at least as long: stop at the first that already lives long enough.
        for (Index up = nodes_[place.node].parent; up != kRoot; up = nodes_[up].parent) {
            Hold* above = find_hold(nodes_[up], slot);
            if (above->expiry >= expiry && above->stamp == term.stamp) break;
            above->expiry = std::max(above->expiry, expiry);
            above->stamp = term.stamp;
        }
    }
    const std::size_t known = walk(place, keys, slot, term);
    touch(place.node);
    const std::size_t fitting = known + make_room(keys.size() - known, place.node);
    if (fitting > known) extend(place, keys.subspan(known, fitting - known), slot, term);
    if (nbytes() <= max_bytes_) return fitting;
    while (nbytes() > max_bytes_ && oldest_ != kNil) evict(oldest_);
    return still_held(keys, slot);
}

std::size_t PromptTree::remove(std::span<const std::uint64_t> keys, std::uint32_t slot, double now) {
    const std::lock_guard lock(mutex_);
    ensure_instance(slot);
    now_ = std::max(now_, now);
    std::size_t given_up = 0;
    for (const std::uint64_t key : keys) {
        if (const std::optional<Place> held = find_held(key, slot)) given_up += release(held->node, held->offset - 1, slot);
    }
    return given_up;
}

std::size_t PromptTree::match(std::span<const std::uint64_t> keys, double now, std::span<std::int32_t> scores) {
    const std::lock_guard lock(mutex_);
    now_ = std::max(now_, now);
    std::fill(scores.begin(), scores.end(), 0);
    std::size_t depth = 0, longest = 0;
    Index at = kRoot;
    while (depth < keys.size()) {
        const Index child = find_child(at, keys[depth]);
        if (child == kNil) break;
        at = child;
        const Node& node = nodes_[at];
        const std::size_t common = common_prefix(keys.subspan(depth), node.keys);
        for (const Hold& h : node.holds) {
            if (!alive(h)) continue;
            const std::size_t blocks = depth + std::min<std::size_t>(common, h.blocks);
            longest = std::max(longest, blocks);
            if (h.slot < scores.size()) scores[h.slot] = static_cast<std::int32_t>(blocks);
        }
        depth += common;
        if (common < node.keys.size()) break;
    }
    touch(at);
    return longest;
}

void PromptTree::limit(std::uint32_t slot, std::uint32_t blocks) {
    const std::lock_guard lock(mutex_);
    ensure_instance(slot);
    instances_[slot].capacity = blocks;
}

void PromptTree::retire(std::uint32_t slot) {
    const std::lock_guard lock(mutex_);
    ensure_instance(slot);
    Instance& instance = instances_[slot];
    count(slot, -static_cast<std::ptrdiff_t>(instance.entries));
    if (++instance.generation != 0) return;
    // Generations have wrapped to 0, which no hold has: none of an earlier life may be left to come alive again.
    for (Index i = 1; i < nodes_.size(); ++i) {
        if (nodes_[i].live) clean(i);
    }
    instance.generation = 1;
}

std::size_t PromptTree::sweep(double now, std::size_t max_nodes) {
    const std::lock_guard lock(mutex_);
    now_ = std::max(now_, now);
    const std::size_t visits = std::min(max_nodes, nodes_.size());
    for (std::size_t i = 0; i < visits; ++i) sweep_one();
    table_.shrink();
    return visits;
}

std::size_t PromptTree::entries(std::uint32_t slot) const {
    const std::lock_guard lock(mutex_);
    return slot < instances_.size() ? instances_[slot].entries : 0;
}

PromptTree::Stats PromptTree::stats() const {
    const std::lock_guard lock(mutex_);
    return Stats{table_.size(), entries_, nodes_.size() - free_.size() - 1, nbytes(), evicted_, expired_, orphans_};
}

// --- holds -----------------------------------------------------------------------------------------------

bool PromptTree::current(const Hold& hold) const noexcept {
    return hold.generation == instances_[hold.slot].generation;
}

bool PromptTree::alive(const Hold& hold) const noexcept {
    const Instance& instance = instances_[hold.slot];
    return hold.expiry > now_ && hold.generation == instance.generation &&
           instance.taken_in - hold.stamp <= instance.capacity;
}

PromptTree::Hold* PromptTree::find_hold(Node& node, std::uint32_t slot) {
    const auto at = std::lower_bound(node.holds.begin(), node.holds.end(), slot,
                                     [](const Hold& h, std::uint32_t s) { return h.slot < s; });
    return at != node.holds.end() && at->slot == slot ? &*at : nullptr;
}

void PromptTree::ensure_instance(std::uint32_t slot) {
    if (slot >= kMaxInstances) throw Error(Code::kConfig, "a prompt tree knows at most 65536 instances");
    if (slot >= instances_.size()) instances_.resize(slot + 1);
}

void PromptTree::count(std::uint32_t slot, std::ptrdiff_t entries) noexcept {
    instances_[slot].entries += static_cast<std::size_t>(entries);
    entries_ += static_cast<std::size_t>(entries);
}

void PromptTree::take_in(std::uint32_t slot, std::size_t blocks) noexcept {
    count(slot, static_cast<std::ptrdiff_t>(blocks));
    instances_[slot].taken_in += static_cast<std::uint32_t>(blocks);
}

// Lets `slot` hold the first `blocks` keys of the node; splits it where parts would expire at different times.
// Returns where the held part ends.
PromptTree::Place PromptTree::hold(Index index, std::size_t blocks, std::uint32_t slot, const Term& term) {
    Node& node = nodes_[index];
    Hold* held = find_hold(node, slot);
    const Hold wanted{static_cast<std::uint16_t>(slot), instances_[slot].generation,
                      static_cast<std::uint32_t>(blocks), term.stamp, term.expiry};
    if (held == nullptr) {
        const Account account(*this, node);
        const auto at = std::lower_bound(node.holds.begin(), node.holds.end(), slot,
                                         [](const Hold& h, std::uint32_t s) { return h.slot < s; });
        node.holds.insert(at, wanted);
        take_in(slot, blocks);
        return {index, blocks};
    }
    if (!alive(*held)) {
        if (current(*held)) {
            count(slot, -static_cast<std::ptrdiff_t>(held->blocks));
            expired_ += held->blocks;
        }
        *held = wanted;
        take_in(slot, blocks);
        return {index, blocks};
    }
    const bool renews = term.expiry > held->expiry || term.stamp != held->stamp;
    if (renews && blocks < held->blocks) {  // [0, blocks) lives longer than [blocks, held)
        split(index, blocks);
        held = find_hold(node, slot);
    }
    held->stamp = term.stamp;
    if (term.expiry < held->expiry && blocks > held->blocks) {  // [0, held) lives longer than [held, blocks)
        const std::size_t head = held->blocks;
        return hold(split(index, head), blocks - head, slot, term);
    }
    if (blocks > held->blocks) {
        take_in(slot, blocks - held->blocks);
        held->blocks = wanted.blocks;
    }
    held->expiry = std::max(held->expiry, term.expiry);
    return {index, blocks};
}

void PromptTree::drop_hold(Node& node, std::size_t at) {
    const Hold gone = node.holds[at];
    if (current(gone)) count(gone.slot, -static_cast<std::ptrdiff_t>(gone.blocks));
    const Account account(*this, node);
    node.holds.erase(node.holds.begin() + static_cast<std::ptrdiff_t>(at));
}

// `slot` keeps the first `keep` keys of the node and nothing below it.
std::size_t PromptTree::release(Index index, std::size_t keep, std::uint32_t slot) {
    std::vector<Index> order{index};  // each node after its parent
    std::size_t given_up = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
        Node& node = nodes_[order[i]];
        Hold* held = find_hold(node, slot);
        const std::size_t kept = i == 0 ? keep : 0;
        const bool whole = held->blocks == node.keys.size();
        given_up += held->blocks - kept;
        if (kept == 0) {
            drop_hold(node, static_cast<std::size_t>(held - node.holds.data()));
        } else {
            count(slot, static_cast<std::ptrdiff_t>(kept) - static_cast<std::ptrdiff_t>(held->blocks));
            held->blocks = static_cast<std::uint32_t>(kept);
        }
        if (!whole) continue;
        for (Index child = node.child; child != kNil; child = nodes_[child].next) {
            const Hold* below = find_hold(nodes_[child], slot);
            if (below != nullptr && alive(*below)) order.push_back(child);
        }
    }
    for (std::size_t i = order.size(); i-- > 0;) {
        if (nodes_[order[i]].live) prune(order[i]);
    }
    return given_up;
}

// --- lookup and growth -----------------------------------------------------------------------------------

PromptTree::Index PromptTree::find_child(Index parent, std::uint64_t key) const {
    return table_.find(key, [&](Index i) { return nodes_[i].parent == parent && nodes_[i].keys.front() == key; });
}

// The place just behind `key`, where `slot` holds it.
std::optional<PromptTree::Place> PromptTree::find_held(std::uint64_t key, std::uint32_t slot) {
    std::size_t offset = 0;
    const Index found = table_.find(key, [&](Index i) {
        Node& node = nodes_[i];
        const Hold* held = find_hold(node, slot);
        if (held == nullptr || !alive(*held)) return false;
        // From the end: instances give up the ends of runs, and append to them.
        offset = held->blocks;
        while (offset > 0 && node.keys[offset - 1] != key) --offset;
        return offset > 0;
    });
    return found == kNil ? std::nullopt : std::optional<Place>({found, offset});
}

// Follows known keys from `place`, holding them; returns how many there were and leaves `place` behind the last.
std::size_t PromptTree::walk(Place& place, std::span<const std::uint64_t> keys, std::uint32_t slot,
                             const Term& term) {
    std::size_t done = 0;
    while (done < keys.size()) {
        if (place.offset == nodes_[place.node].keys.size()) {
            const Index child = find_child(place.node, keys[done]);
            if (child == kNil) break;
            place = {child, 0};
        }
        const std::span<const std::uint64_t> run(nodes_[place.node].keys);
        const std::size_t common = common_prefix(keys.subspan(done), run.subspan(place.offset));
        if (common == 0) break;
        place = hold(place.node, place.offset + common, slot, term);
        done += common;
    }
    return done;
}

void PromptTree::extend(Place& place, std::span<const std::uint64_t> keys, std::uint32_t slot, const Term& term) {
    if (place.offset < nodes_[place.node].keys.size()) split(place.node, place.offset);
    while (!keys.empty()) {
        Node& node = nodes_[place.node];
        // A leaf grows in place when its new part expires with the old one: a conversation stays one run.
        const bool grows = place.node != kRoot && node.child == kNil && node.keys.size() < kMaxRun &&
                           find_hold(node, slot)->expiry == term.expiry;
        if (!grows) place = {allocate(place.node), 0};
        const std::size_t piece = std::min(keys.size(), kMaxRun - place.offset);
        append(place.node, keys.first(piece));
        place = hold(place.node, place.offset + piece, slot, term);
        keys = keys.subspan(piece);
    }
}

std::size_t PromptTree::still_held(std::span<const std::uint64_t> keys, std::uint32_t slot) {
    std::size_t n = keys.size();
    while (n > 0 && !find_held(keys[n - 1], slot)) --n;
    return n;
}

void PromptTree::append(Index index, std::span<const std::uint64_t> keys) {
    Node& node = nodes_[index];
    const Account account(*this, node);
    const std::size_t wanted = node.keys.size() + keys.size();
    if (wanted > node.keys.capacity()) {
        node.keys.reserve(node.keys.empty() ? wanted : std::max(wanted, node.keys.size() / 4 * 5));
    }
    node.keys.insert(node.keys.end(), keys.begin(), keys.end());
    for (const std::uint64_t key : keys) table_.insert(key, index);
}

// The node keeps its first `offset` keys; a new only child takes the rest, with its share of each hold.
PromptTree::Index PromptTree::split(Index index, std::size_t offset) {
    const Index below = allocate(index);
    Node& head = nodes_[index];
    Node& tail = nodes_[below];
    unlink_child(below);  // take over the head's children before becoming its only one
    std::swap(head.child, tail.child);
    for (Index child = tail.child; child != kNil; child = nodes_[child].next) nodes_[child].parent = below;
    head.child = below;
    tail.next = tail.prev = kNil;
    const Account head_account(*this, head);
    const Account tail_account(*this, tail);
    const auto cut = head.keys.begin() + static_cast<std::ptrdiff_t>(offset);
    tail.keys.assign(cut, head.keys.end());
    head.keys.erase(cut, head.keys.end());
    head.keys.shrink_to_fit();
    for (const std::uint64_t key : tail.keys) table_.replace(key, index, below);
    for (Hold& held : head.holds) {
        if (held.blocks <= offset) continue;
        tail.holds.push_back(held);
        tail.holds.back().blocks -= static_cast<std::uint32_t>(offset);
        held.blocks = static_cast<std::uint32_t>(offset);
    }
    return below;
}

}  // namespace poolweave
