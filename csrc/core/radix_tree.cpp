#include "core/radix_tree.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <shared_mutex>

#include "core/error.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

namespace {

constexpr std::size_t kMinBytes = 64 << 10;
constexpr std::size_t kMaxMissSlots = 64 << 10;  // 256 KiB
constexpr std::int64_t kMaxTtl = std::int64_t{1} << 62;
constexpr std::uint64_t kMix = 0x9E3779B97F4A7C15u;

// Under a cap, what a policy remembers of blocks that it gave up takes about a sixteenth of it.
std::size_t max_ghosts(std::size_t max_bytes) {
    constexpr std::size_t kMost = 128 << 10;  // 3 MiB
    return max_bytes == 0 ? kMost : std::min(kMost, std::bit_floor(max_bytes / 512));
}

// Under a cap, what misses are remembered by takes at most a sixteenth of it.
std::size_t miss_slots(const RadixConfig& config) {
    const std::size_t max_bytes = config.max_bytes;
    if (!config.explains_misses) return 1;
    if (max_bytes == 0) return kMaxMissSlots;
    return std::min(kMaxMissSlots, std::bit_floor(max_bytes / 64));
}

const RadixConfig& valid(const RadixConfig& config) {
    if (!std::has_single_bit(config.block_tokens) || config.block_tokens > (1u << 20)) {
        throw Error(Code::kConfig,
                    "block_tokens=" + std::to_string(config.block_tokens) + " is not a power of two up to 2**20");
    }
    for (const std::size_t cap : {config.max_bytes, config.max_tenant_bytes}) {
        if (cap != 0 && cap < kMinBytes) {
            throw Error(Code::kConfig, "a cap of " + std::to_string(cap) + " bytes holds nothing; the least is " +
                                           std::to_string(kMinBytes));
        }
    }
    if (config.ttl_ns < 0 || config.ttl_ns > kMaxTtl) {
        throw Error(Code::kConfig, "a time to live of " + std::to_string(config.ttl_ns) + " ns is not between 0 and 2**62");
    }
    return config;
}

}  // namespace

void require_tokens(Tokens tokens) {
    std::int32_t all = 0;
    for (const std::int32_t token : tokens) all |= token;  // vectorised: one pass at memory speed
    if (all >= 0) return;
    const auto bad = std::find_if(tokens.begin(), tokens.end(), [](std::int32_t token) { return token < 0; });
    throw Error(Code::kConfig, "token id " + std::to_string(*bad) + " is negative; ids run from 0 to 2147483647");
}

RadixTree::RadixTree(const RadixConfig& config)
    : config_(valid(config)),
      block_shift_(static_cast<std::uint32_t>(std::countr_zero(config.block_tokens))),
      block_bytes_(config.block_tokens * sizeof(std::int32_t)),
      nodes_(config.block_tokens),
      misses_(miss_slots(config)),
      order_(make_eviction_order({config.eviction, config.cost, config.block_tokens, max_ghosts(config.max_bytes)})) {}

// --- tokens and bucket hashes ------------------------------------------------------------------------------

bool RadixTree::same_blocks(const std::int32_t* a, const std::int32_t* b, std::size_t count) const noexcept {
    return std::memcmp(a, b, count * block_bytes_) == 0;
}

// memcmp tells only whether, not where: 1 KiB strides keep its speed and bound the search in the one that differs.
std::size_t RadixTree::common_blocks(const std::int32_t* a, const std::int32_t* b, std::size_t limit) const noexcept {
    const std::size_t stride = std::max<std::size_t>(1, 1024 / block_bytes_);
    std::size_t same = 0;
    while (same + stride <= limit && same_blocks(block_at(a, same), block_at(b, same), stride)) same += stride;
    while (same < limit && same_blocks(block_at(a, same), block_at(b, same), 1)) ++same;
    return same;
}

std::uint32_t RadixTree::child_hash(NodeId parent, const std::int32_t* block) const noexcept {
    return static_cast<std::uint32_t>(XXH3_64bits_withSeed(block, block_bytes_, config_.seed + parent * kMix));
}

std::uint32_t RadixTree::first_hash(const std::int32_t* block) const noexcept { return child_hash(kNoNode, block); }

std::uint64_t RadixTree::block_hash(const std::int32_t* block) const noexcept {
    return XXH3_64bits_withSeed(block, block_bytes_, config_.seed);
}

// A block that is missing, known by its namespace, depth, own tokens and those of the block before it (0: none).
std::uint64_t RadixTree::miss_hash(std::uint32_t ns, std::size_t depth, std::uint64_t block, std::uint64_t before) noexcept {
    const std::uint64_t place = (std::uint64_t{ns} << 32 | depth) + 1;
    const std::uint64_t hash = (block ^ std::rotl(before, 23)) + place * kMix;
    return (hash ^ hash >> 29) * kMix;
}

// --- lookup ------------------------------------------------------------------------------------------------

NodeId RadixTree::find_root(std::uint32_t ns) const noexcept {
    const auto found = roots_.find(ns);
    return found == roots_.end() ? kNoNode : found->second;
}

NodeId RadixTree::find_child(NodeId parent, const std::int32_t* block) const noexcept {
    const auto* entry = children_.find(child_hash(parent, block), [&](NodeId id) {
        const Node& node = nodes_[id];
        return node.parent == parent && same_blocks(node.tokens, block, 1);
    });
    return entry == nullptr ? kNoNode : entry->value;
}

bool RadixTree::lapsed(const Node& node, std::int64_t now_ns) const noexcept {
    return config_.ttl_ns != 0 && node.used_ns.load(std::memory_order_relaxed) + config_.ttl_ns <= now_ns;
}

RadixTree::Position RadixTree::walk(Tokens tokens, std::uint32_t ns, std::int64_t now_ns) const noexcept {
    const std::size_t wanted = whole_blocks(tokens);
    Position end;
    end.node = find_root(ns);
    while (end.node != kNoNode && end.blocks < wanted && end.offset == nodes_[end.node].num_blocks) {
        const std::int32_t* rest = block_at(tokens.data(), end.blocks);
        const NodeId child = find_child(end.node, rest);
        if (child == kNoNode) break;
        const Node& node = nodes_[child];
        if (lapsed(node, now_ns)) {
            end.lapsed = true;
            break;
        }
        end.offset = common_blocks(node.tokens, rest, std::min<std::size_t>(node.num_blocks, wanted - end.blocks));
        end.blocks += end.offset;
        end.node = child;
    }
    return end;
}

void RadixTree::collect(const Position& end, std::uint64_t* payloads) const noexcept {
    std::size_t left = end.blocks;
    std::size_t count = end.offset;
    for (NodeId id = end.node; left > 0; id = nodes_[id].parent, count = nodes_[id].num_blocks) {
        left -= count;
        std::memcpy(payloads + left, nodes_[id].payloads, count * sizeof(std::uint64_t));
    }
}

MissReason RadixTree::why(Tokens tokens, std::uint32_t ns, const Position& end) const noexcept {
    if (end.blocks == whole_blocks(tokens)) return MissReason::kNone;
    if (end.lapsed) return MissReason::kExpired;
    const std::int32_t* missing = block_at(tokens.data(), end.blocks);
    const std::uint64_t before = end.blocks == 0 ? 0 : block_hash(block_at(tokens.data(), end.blocks - 1));
    const MissReason known = misses_.find(miss_hash(ns, end.blocks, block_hash(missing), before));
    if (known != MissReason::kNeverStored || end.blocks > 0) return known;
    return first_blocks_.contains(first_hash(missing)) ? MissReason::kOtherIdentity : known;
}

void RadixTree::touch(NodeId deepest, std::int64_t now_ns, std::uint8_t priority) noexcept {
    if (order_) order_->tick();
    for (NodeId id = deepest; id != kNoNode && nodes_[id].parent != kNoNode; id = nodes_[id].parent) {
        Node& node = nodes_[id];
        unlink(id);
        node.priority = std::max(node.priority, priority);
        use(node, now_ns);
        link_front(id);
        if (order_) order_->use(id, node);
    }
}

void RadixTree::use(Node& node, std::int64_t now_ns) noexcept {
    std::int64_t used_ns = node.used_ns.load(std::memory_order_relaxed);
    while (used_ns < now_ns && !node.used_ns.compare_exchange_weak(used_ns, now_ns, std::memory_order_relaxed)) {}
}

// Times to live begin anew at once; the lists follow when the use is settled.
void RadixTree::use_path(NodeId deepest, std::int64_t now_ns) noexcept {
    for (NodeId id = deepest; id != kNoNode; id = nodes_[id].parent) use(nodes_[id], now_ns);
}

void RadixTree::settle() noexcept {
    reads_.drain([this](NodeId id, std::int64_t now_ns) { touch(id, now_ns, 0); });
}

Match RadixTree::match_locked(Tokens tokens, std::uint32_t ns, const Lookup& how) {
    const Position end = walk(tokens, ns, how.now_ns);
    require_tokens(tokens.subspan(end.blocks << block_shift_));  // the rest equals stored tokens, which are valid
    Match result;
    result.num_tokens = end.blocks << block_shift_;
    result.blocks.resize(end.blocks);
    collect(end, result.blocks.data());
    result.miss_reason = why(tokens, ns, end);
    if (end.blocks > 0 && how.pin) result.pinned = end.node;
    const NodeId used = how.touch && end.blocks > 0 ? end.node : kNoNode;
    if (config_.ttl_ns != 0) use_path(used, how.now_ns);
    LookupCounts counts{1, whole_blocks(tokens), end.blocks, {}};
    counts.misses[static_cast<std::size_t>(result.miss_reason)] = 1;
    reads_.note(used, how.now_ns, counts, [this](NodeId id, std::int64_t now_ns) { touch(id, now_ns, 0); });
    return result;
}

Match RadixTree::match(Tokens tokens, std::uint32_t ns, Lookup how) {
    if (how.pin) return match_pinned(tokens, ns, how);
    const std::shared_lock guard(lock_);
    return match_locked(tokens, ns, how);
}

// A pin covers whole runs, so the last one is split where the match ends; only without room for that, all of it is held.
Match RadixTree::match_pinned(Tokens tokens, std::uint32_t ns, const Lookup& how) {
    const std::unique_lock guard(lock_);
    const Position end = walk(tokens, ns, how.now_ns);
    if (end.blocks > 0 && end.offset < nodes_[end.node].num_blocks && excess_bytes(end, 0, ns) == 0) {
        split(end.node, end.offset);
    }
    Match result = match_locked(tokens, ns, how);
    if (result.pinned != kNoNode) pin_path(result.pinned, true);
    return result;
}

void RadixTree::unpin(NodeId pinned) {
    const std::unique_lock guard(lock_);
    pin_path(pinned, false);
}

void RadixTree::pin_path(NodeId deepest, bool pin) noexcept {
    for (NodeId id = deepest; nodes_[id].parent != kNoNode; id = nodes_[id].parent) {
        Node& node = nodes_[id];
        if (node.pins == (pin ? 0u : 1u)) pinned_blocks_ += pin ? node.num_blocks : -std::size_t{node.num_blocks};
        node.pins += pin ? 1u : -1u;
    }
}

void RadixTree::mark(Tokens tokens, std::uint32_t ns, MissReason reason) {
    require_tokens(tokens);
    const std::unique_lock guard(lock_);
    const Position end = walk(tokens, ns, kBeforeAll);
    std::uint64_t before = end.blocks == 0 ? 0 : block_hash(block_at(tokens.data(), end.blocks - 1));
    for (std::size_t i = end.blocks; i < whole_blocks(tokens); ++i) {
        const std::uint64_t hash = block_hash(block_at(tokens.data(), i));
        misses_.mark(miss_hash(ns, i, hash, before), reason);
        before = hash;
    }
}

// --- figures -----------------------------------------------------------------------------------------------

std::size_t RadixTree::num_blocks() const {
    const std::shared_lock guard(lock_);
    return num_blocks_;
}

std::size_t RadixTree::nbytes_locked() const noexcept {
    return nodes_.nbytes() + children_.nbytes() + first_blocks_.nbytes() + misses_.nbytes() + roots_.size() * kRootBytes +
           (order_ ? order_->nbytes() : 0);
}

std::size_t RadixTree::tenant_bytes(std::uint32_t ns) const {
    const std::shared_lock guard(lock_);
    const NodeId root = find_root(ns);
    return root == kNoNode ? 0 : nodes_[root].tenant->bytes;
}

RadixStats RadixTree::stats() const {
    const std::unique_lock guard(lock_);
    RadixStats stats{};
    stats.num_blocks = num_blocks_;
    stats.num_nodes = nodes_.live() - roots_.size();
    stats.num_namespaces = roots_.size();
    stats.pinned_blocks = pinned_blocks_;
    stats.nbytes = nbytes_locked();
    const LookupCounts reads = reads_.counts();
    stats.lookups = reads.lookups;
    stats.asked_blocks = reads.asked_blocks;
    stats.hit_blocks = reads.hit_blocks;
    stats.inserted_blocks = inserted_;
    stats.duplicate_blocks = duplicate_;
    stats.refused_blocks = refused_;
    std::copy(std::begin(reads.misses), std::end(reads.misses), stats.misses);
    std::copy(std::begin(gone_), std::end(gone_), stats.gone);
    return stats;
}

}  // namespace poolweave
