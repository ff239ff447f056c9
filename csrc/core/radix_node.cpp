#include "core/radix_node.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

namespace poolweave {

namespace {

constexpr std::size_t malloc_bytes(std::size_t nbytes) { return (nbytes + 8 + 15) / 16 * 16; }  // glibc: header, 16-byte grain

void* must(void* memory) {
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

NodeSlab::~NodeSlab() {
    for (auto& chunk : chunks_) {
        for (std::size_t i = 0; i < kChunk; ++i) {
            std::free(chunk[i].tokens);
            std::free(chunk[i].payloads);
        }
    }
}

std::size_t NodeSlab::run_bytes(std::size_t num_blocks) const noexcept {
    if (num_blocks == 0) return 0;
    return malloc_bytes(num_blocks * block_tokens_ * sizeof(std::int32_t)) + malloc_bytes(num_blocks * sizeof(std::uint64_t));
}

void NodeSlab::account(Node& node, std::size_t before, std::size_t after) noexcept {
    data_bytes_ += after - before;
    node.tenant->bytes += after - before;
}

void NodeSlab::add_chunk() {
    free_.reserve((chunks_.size() + 1) * kChunk);  // so that free() never allocates
    chunks_.push_back(std::make_unique<Node[]>(kChunk));
    const std::size_t first = (chunks_.size() - 1) * kChunk;
    for (std::size_t i = kChunk; i-- > 0;) {
        if (first + i != kNoNode) free_.push_back(static_cast<NodeId>(first + i));
    }
}

NodeId NodeSlab::make(std::uint32_t num_blocks, Tenant* tenant) {
    if (free_.empty()) add_chunk();
    Node& node = (*this)[free_.back()];
    if (num_blocks > 0) {
        const std::size_t blocks = num_blocks;
        void* tokens = must(std::malloc(blocks * block_tokens_ * sizeof(std::int32_t)));
        void* payloads = std::malloc(blocks * sizeof(std::uint64_t));
        if (payloads == nullptr) {
            std::free(tokens);
            throw std::bad_alloc();
        }
        node.tokens = static_cast<std::int32_t*>(tokens);
        node.payloads = static_cast<std::uint64_t*>(payloads);
    }
    const NodeId id = free_.back();
    free_.pop_back();
    node.num_blocks = num_blocks;
    node.tenant = tenant;
    data_bytes_ += run_bytes(num_blocks);
    tenant->bytes += node_bytes(num_blocks);
    ++live_;
    return id;
}

void NodeSlab::free(NodeId id) noexcept {
    Node& node = (*this)[id];
    data_bytes_ -= run_bytes(node.num_blocks);
    node.tenant->bytes -= node_bytes(node.num_blocks);
    std::free(node.tokens);
    std::free(node.payloads);
    std::destroy_at(&node);
    std::construct_at(&node);
    free_.push_back(id);
    --live_;
}

void NodeSlab::resize(Node& node, std::uint32_t num_blocks) {
    const std::size_t blocks = num_blocks;
    const bool shrinks = num_blocks <= node.num_blocks;
    // A shrinking realloc that fails leaves the longer array, which serves as well.
    void* tokens = std::realloc(node.tokens, blocks * block_tokens_ * sizeof(std::int32_t));
    if (tokens != nullptr) node.tokens = static_cast<std::int32_t*>(tokens);
    if (tokens == nullptr && !shrinks) throw std::bad_alloc();
    void* payloads = std::realloc(node.payloads, blocks * sizeof(std::uint64_t));
    if (payloads != nullptr) node.payloads = static_cast<std::uint64_t*>(payloads);
    if (payloads == nullptr && !shrinks) throw std::bad_alloc();
    account(node, run_bytes(node.num_blocks), run_bytes(num_blocks));
    node.num_blocks = num_blocks;
}

void NodeSlab::drop_front(Node& node, std::uint32_t count) noexcept {
    const std::size_t kept = node.num_blocks - count;
    const std::size_t words = block_tokens_;
    std::memmove(node.tokens, node.tokens + count * words, kept * words * sizeof(std::int32_t));
    std::memmove(node.payloads, node.payloads + count, kept * sizeof(std::uint64_t));
    resize(node, static_cast<std::uint32_t>(kept));
}

bool NodeSlab::join(const Node& upper, Node& lower) noexcept {
    const std::size_t added = upper.num_blocks;
    const std::size_t kept = lower.num_blocks;
    const std::size_t words = block_tokens_;
    try {
        resize(lower, static_cast<std::uint32_t>(added + kept));
    } catch (const std::bad_alloc&) {
        return false;
    }
    std::memmove(lower.tokens + added * words, lower.tokens, kept * words * sizeof(std::int32_t));
    std::memmove(lower.payloads + added, lower.payloads, kept * sizeof(std::uint64_t));
    std::memcpy(lower.tokens, upper.tokens, added * words * sizeof(std::int32_t));
    std::memcpy(lower.payloads, upper.payloads, added * sizeof(std::uint64_t));
    return true;
}

void NodeSlab::move(Node& node, Tenant* tenant) noexcept {
    node.tenant->bytes -= node_bytes(node.num_blocks);
    tenant->bytes += node_bytes(node.num_blocks);
    node.tenant = tenant;
}

void RecencyLists::push_front(NodeSlab& nodes, NodeId id) noexcept {
    Node& node = nodes[id];
    const std::size_t priority = node.priority;
    node.newer[kind_] = kNoNode;
    node.older[kind_] = newest_[priority];
    if (newest_[priority] != kNoNode) {
        nodes[newest_[priority]].newer[kind_] = id;
    } else {
        oldest_[priority] = id;
    }
    newest_[priority] = id;
}

void RecencyLists::insert_newer(NodeSlab& nodes, NodeId id, NodeId than) noexcept {
    Node& node = nodes[id];
    Node& old = nodes[than];
    node.older[kind_] = than;
    node.newer[kind_] = old.newer[kind_];
    if (old.newer[kind_] != kNoNode) {
        nodes[old.newer[kind_]].older[kind_] = id;
    } else {
        newest_[old.priority] = id;
    }
    old.newer[kind_] = id;
}

void RecencyLists::remove(NodeSlab& nodes, NodeId id) noexcept {
    Node& node = nodes[id];
    const NodeId newer = node.newer[kind_];
    const NodeId older = node.older[kind_];
    if (newer != kNoNode) {
        nodes[newer].older[kind_] = older;
    } else {
        newest_[node.priority] = older;
    }
    if (older != kNoNode) {
        nodes[older].newer[kind_] = newer;
    } else {
        oldest_[node.priority] = newer;
    }
    node.newer[kind_] = node.older[kind_] = kNoNode;
}

}  // namespace poolweave
