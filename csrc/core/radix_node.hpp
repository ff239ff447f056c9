// The nodes of the radix tree: a run of blocks each, with stable 32-bit ids and the links of its recency lists.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace poolweave {

using NodeId = std::uint32_t;
inline constexpr NodeId kNoNode = 0;        // an id that is never given out
inline constexpr std::size_t kPriorities = 8;

struct Node;
class NodeSlab;

// The two recency lists that a node is in.
enum ListKind : std::size_t { kWholeTree = 0, kOneTenant = 1 };

// Least recently used order by priority: victims are found at the back of the lowest list that is not empty.
class RecencyLists {
  public:
    explicit RecencyLists(ListKind kind) noexcept : kind_(kind) {}

    void push_front(NodeSlab& nodes, NodeId id) noexcept;
    void insert_newer(NodeSlab& nodes, NodeId id, NodeId than) noexcept;  // directly in front of `than`
    void remove(NodeSlab& nodes, NodeId id) noexcept;
    NodeId oldest(std::size_t priority) const noexcept { return oldest_[priority]; }
    NodeId newest(std::size_t priority) const noexcept { return newest_[priority]; }

  private:
    ListKind kind_;
    NodeId newest_[kPriorities] = {};
    NodeId oldest_[kPriorities] = {};
};

// Who pays for a namespace's runs.
struct Tenant {
    RecencyLists lists{kOneTenant};   // kept only where tenants have a cap
    std::size_t bytes = 0;
    std::size_t num_roots = 0;
};

struct Node {
    std::int32_t* tokens = nullptr;      // num_blocks * block_tokens ids
    std::uint64_t* payloads = nullptr;   // num_blocks
    Tenant* tenant = nullptr;
    std::atomic<std::int64_t> used_ns{0};
    NodeId parent = kNoNode;
    NodeId root = kNoNode;
    NodeId newer[2] = {kNoNode, kNoNode};  // by ListKind
    NodeId older[2] = {kNoNode, kNoNode};
    std::uint32_t hash = 0;              // of the parent and the first block: the bucket in the child table
    std::uint32_t depth = 0;             // blocks above this node
    std::uint32_t num_blocks = 0;
    std::uint32_t num_children = 0;
    std::uint32_t pins = 0;              // pins that end here or below; a pinned node has pinned ancestors only
    std::uint32_t ns = 0;
    std::uint8_t priority = 0;
};

// Owns the nodes and their runs, whose arrays are always exactly as long as their blocks, and keeps the books of bytes.
// Pointers stay valid until the node is freed. Not thread-safe: the tree locks.
class NodeSlab {
  public:
    explicit NodeSlab(std::uint32_t block_tokens) : block_tokens_(block_tokens) {}
    ~NodeSlab();
    NodeSlab(const NodeSlab&) = delete;
    NodeSlab& operator=(const NodeSlab&) = delete;

    Node& operator[](NodeId id) noexcept { return chunks_[id / kChunk][id % kChunk]; }
    const Node& operator[](NodeId id) const noexcept { return chunks_[id / kChunk][id % kChunk]; }

    // A fresh node with arrays for `num_blocks`, for the caller to fill. Throws bad_alloc and then changes nothing.
    NodeId make(std::uint32_t num_blocks, Tenant* tenant);
    void free(NodeId id) noexcept;
    // Longer or shorter arrays; blocks up to the smaller length stay. Only growing can throw, changing nothing.
    void resize(Node& node, std::uint32_t num_blocks);
    // Drops the first `count` blocks; at least one stays.
    void drop_front(Node& node, std::uint32_t count) noexcept;
    // Puts the blocks of `upper` in front of those of `lower`; `upper` keeps its own. False without memory.
    bool join(const Node& upper, Node& lower) noexcept;
    // Accounts a node to another tenant.
    void move(Node& node, Tenant* tenant) noexcept;

    std::size_t node_bytes(std::size_t num_blocks) const noexcept { return sizeof(Node) + run_bytes(num_blocks); }
    std::size_t run_bytes(std::size_t num_blocks) const noexcept;  // what malloc takes for both arrays
    std::size_t nbytes() const noexcept { return data_bytes_ + chunks_.size() * kChunk * sizeof(Node); }
    // What making `count` more nodes may add to nbytes(), without their arrays.
    std::size_t growth_bytes(std::size_t count) const noexcept {
        return free_.size() >= count ? 0 : (count + kChunk - 1) / kChunk * kChunk * sizeof(Node);
    }
    std::size_t live() const noexcept { return live_; }
    // All ids lie below this, also that of the next node made.
    std::size_t num_ids_after_make() const noexcept { return (chunks_.size() + (free_.empty() ? 1 : 0)) * kChunk; }

  private:
    static constexpr std::size_t kChunk = 64;

    void add_chunk();
    void account(Node& node, std::size_t before, std::size_t after) noexcept;

    std::uint32_t block_tokens_;
    std::vector<std::unique_ptr<Node[]>> chunks_;
    std::vector<NodeId> free_;
    std::size_t data_bytes_ = 0;
    std::size_t live_ = 0;
};

}  // namespace poolweave
