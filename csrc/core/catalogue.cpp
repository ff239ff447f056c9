#include "core/catalogue.hpp"

#include <algorithm>
#include <string>

#include "core/error.hpp"

namespace poolweave {

Match Catalogue::match(Tokens tokens, std::uint32_t ns) {
    Match found = tree_.match(tokens, ns);
    table_->retain(found.blocks);
    return found;
}

Inserted Catalogue::insert(Tokens tokens, Payloads handles, std::uint32_t ns) {
    const std::size_t block_tokens = tree_.block_tokens();
    const std::size_t whole = std::min(tokens.size() / block_tokens, handles.size());
    tokens = tokens.first(whole * block_tokens);
    handles = handles.first(whole);
    if (table_->check_insertable(handles) > 0) require_in_place(tokens, handles, ns);
    Inserted inserted = tree_.insert(tokens, handles, ns);
    // Below a block that is new there is nothing old: duplicates are a leading run.
    const std::size_t first = inserted.duplicates.size();
    table_->index(handles.subspan(first, inserted.num_tokens / block_tokens - first));
    return inserted;
}

// Each block that is indexed already must be so at this very place: it can be in one place only.
void Catalogue::require_in_place(Tokens tokens, Payloads handles, std::uint32_t ns) {
    const Match there = tree_.match(tokens, ns, {.touch = false});
    std::vector<std::uint8_t> flags(handles.size());
    table_->flags(handles, flags);
    for (std::size_t i = 0; i < handles.size(); ++i) {
        const bool in_place = i < there.blocks.size() && there.blocks[i] == handles[i];
        if ((flags[i] & BlockTable::kIndexed) == 0 || in_place) continue;
        throw Error(Code::kConfig, "block " + std::to_string(handles[i]) +
                                       " is indexed under another prefix already; copy it to a new block");
    }
}

Placed Catalogue::place(const Expected& expected) {
    Placed placed;
    if (!expected.tokens.empty()) {
        placed.held = tree_.match(expected.tokens, expected.ns).blocks;
        if (placed.held.size() > expected.num_blocks) placed.held.resize(expected.num_blocks);
        table_->retain(placed.held);
    }
    if (expected.mask == 0) return placed;
    placed.fresh.resize(expected.num_blocks - placed.held.size());
    if (!table_->alloc(placed.fresh, expected.mask, expected.tenant)) {
        placed.fresh.clear();
        return placed;
    }
    placed.tiers.resize(placed.fresh.size());
    placed.slots.resize(placed.fresh.size());
    table_->locate(placed.fresh, {placed.tiers, placed.slots});
    return placed;
}

Inserted Catalogue::commit(const Came& came) {
    const std::size_t num_held = came.held.size();
    table_->seal(came.fresh.first(came.num_whole - std::min(came.num_whole, num_held)));
    if (came.is_private) table_->set_private(came.fresh);
    if (came.tokens.empty()) return {};
    PayloadList blocks(came.held.begin(), came.held.end());
    blocks.insert(blocks.end(), came.fresh.begin(), came.fresh.end());
    blocks.resize(came.num_whole);
    return insert(came.tokens, blocks, came.ns);
}

}  // namespace poolweave
