// The index and the table of one pool in step: what is matched is pinned, what is indexed is sealed. Knows no bytes.
//
// Each call is several calls of both. The caller keeps other composites away meanwhile (the pool's lock), so that no
// block is given up between them; blocks that only callers refer to may come and go.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/block_table.hpp"
#include "core/radix_tree.hpp"

namespace poolweave {

// Blocks that are to come in. No `tokens`: nothing is matched. No `mask`: nothing is allocated.
struct Expected {
    Tokens tokens;
    std::uint32_t ns = 0;
    std::size_t num_blocks = 0;
    unsigned mask = 0;
    TenantId tenant = 0;
};

// Where they go, by tier number: `held` are here already, with a reference each; `fresh` take the rest, at `tiers` and `slots`. There are
// none of these when there is no room for all.
struct Placed {
    PayloadList held;
    PayloadList fresh;
    std::vector<std::uint8_t> tiers;
    std::vector<std::int32_t> slots;
};

// Blocks that came in: the first `num_whole` of `held` and `fresh` together are full. No `tokens`: they are not indexed.
struct Came {
    Payloads held;
    Payloads fresh;
    std::size_t num_whole = 0;
    Tokens tokens;
    std::uint32_t ns = 0;
    bool is_private = false;
};

class Catalogue {
  public:
    Catalogue(std::shared_ptr<BlockTable> table, RadixTree& tree) : table_(std::move(table)), tree_(tree) {}

    // The longest indexed prefix, with one reference on each block for the caller.
    Match match(Tokens tokens, std::uint32_t ns);
    // Index the whole blocks of `tokens` that `handles` has. Throws kNotSealed, kUnknownBlock, kStaleHandle, and kConfig for
    // a block given twice or indexed under another prefix; then nothing changed.
    Inserted insert(Tokens tokens, Payloads handles, std::uint32_t ns);

    Placed place(const Expected& expected);
    // Seal the full ones of `fresh`, and index. Throws as insert(). The references stay the caller's.
    Inserted commit(const Came& came);
    // Drop one reference on each. Returns how many blocks became free or evictable by it.
    std::size_t release(Payloads handles) { return table_->free(handles); }

  private:
    void require_in_place(Tokens tokens, Payloads handles, std::uint32_t ns);

    std::shared_ptr<BlockTable> table_;
    RadixTree& tree_;
};

}  // namespace poolweave
