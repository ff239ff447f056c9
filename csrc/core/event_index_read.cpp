// What the event index answers: matches, inventories, figures, and whether it is sound.
#include <algorithm>
#include <bit>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "core/event_index.hpp"

namespace poolweave {

std::size_t EventIndex::match(std::span<const std::int32_t> tokens, std::string_view scope,
                              std::span<const std::string_view> extra_keys, std::span<std::int32_t> scores) const {
    std::fill(scores.begin(), scores.end(), 0);
    const std::shared_lock guard(lock_);
    const auto root = scopes_.find(std::string(scope));
    if (root == scopes_.end()) return 0;
    std::vector<std::uint64_t> alive = trusted_;
    BlockId at = root->second;
    std::size_t depth = 0;
    const auto leave = [&](std::size_t word, std::uint64_t gone) {
        for (; gone != 0; gone &= gone - 1) {
            const std::size_t slot = word * 64 + static_cast<std::size_t>(std::countr_zero(gone));
            if (slot < scores.size()) scores[slot] = static_cast<std::int32_t>(depth);
        }
    };
    for (const std::size_t count = tokens.size() / block_tokens_; depth < count; ++depth) {
        std::uint32_t extra = 0;
        if (depth < extra_keys.size() && !extra_keys[depth].empty()) {
            const auto known = extras_.find(std::string(extra_keys[depth]));
            if (known == extras_.end()) break;
            extra = known->second;
        }
        const std::int32_t* block_tokens = tokens.data() + depth * block_tokens_;
        const BlockId next = find(at, block_tokens, extra);
        if (next == 0) break;
        std::uint64_t any = 0;
        for (std::size_t word = 0; word < words_; ++word) {
            const std::uint64_t still = alive[word] & holders_of(next)[word];
            leave(word, alive[word] & ~still);
            alive[word] = still;
            any |= still;
        }
        if (any == 0) return depth;
        at = next;
    }
    for (std::size_t word = 0; word < words_; ++word) leave(word, alive[word]);
    return depth;
}

std::vector<StoredRun> EventIndex::inventory(std::uint32_t source) const {
    const std::shared_lock guard(lock_);
    std::vector<HeldTable::Entry> entries;
    live_source(source).held.each([&](const HeldTable::Entry& entry) { entries.push_back(entry); });
    std::sort(entries.begin(), entries.end(), [&](const auto& a, const auto& b) {
        return std::pair(block(a.block).depth, a.block) < std::pair(block(b.block).depth, b.block);
    });
    std::vector<StoredRun> runs;
    std::unordered_map<BlockId, std::uint64_t> names;          // blocks written so far -> their hashes
    std::unordered_map<BlockId, std::size_t> open;             // the last block of each run that may go on -> the run
    for (const HeldTable::Entry& entry : entries) {
        const Block& held = block(entry.block);
        const bool starts = block(held.parent).parent == 0;
        const auto parent = names.find(held.parent);
        if (held.extra != 0 || (!starts && parent == names.end()) || !names.emplace(entry.block, entry.hash).second) continue;
        std::size_t run = runs.size();
        std::uint8_t media = 0;
        for (std::size_t i = 0; i < kMedia; ++i) media = static_cast<std::uint8_t>(media | (entry.copies[i] > 0 ? 1u << i : 0u));
        if (const auto last = open.find(held.parent); last != open.end() && runs[last->second].media == media) {
            run = last->second;
            open.erase(last);
        } else {
            runs.push_back({!starts, starts ? 0 : parent->second, media, starts ? scope_names_.at(held.parent) : "", {}, {}});
        }
        open[entry.block] = run;
        runs[run].hashes.push_back(entry.hash);
        runs[run].tokens.insert(runs[run].tokens.end(), tokens_of(entry.block), tokens_of(entry.block) + block_tokens_);
    }
    return runs;
}

std::size_t EventIndex::num_held(std::uint32_t source) const {
    const std::shared_lock guard(lock_);
    return live_source(source).held.size();
}

std::size_t EventIndex::num_slots() const {
    const std::shared_lock guard(lock_);
    return sources_.size();
}

EventIndexStats EventIndex::stats() const {
    const std::shared_lock guard(lock_);
    EventIndexStats stats{num_blocks_, 0, 0, 0};
    const std::size_t per_block = sizeof(Block) + block_tokens_ * sizeof(std::int32_t) + words_ * sizeof(std::uint64_t);
    stats.nbytes = fresh_ * per_block + children_.nbytes();
    for (const Source& source : sources_) {
        stats.num_entries += source.held.size();
        stats.num_sources += source.live ? 1 : 0;
        stats.nbytes += source.held.nbytes();
    }
    return stats;
}

std::string EventIndex::check() const {
    const std::shared_lock guard(lock_);
    std::unordered_map<BlockId, std::uint32_t> refs;
    std::vector<BlockId> order;
    for (std::uint32_t slot = 0; slot < sources_.size(); ++slot) {
        sources_[slot].held.each([&](const HeldTable::Entry& entry) {
            if (refs[entry.block]++ == 0) order.push_back(entry.block);
        });
    }
    for (std::size_t i = 0; i < order.size(); ++i) {
        const Block& held = block(order[i]);
        if (held.parent == 0) continue;
        if (find(held.parent, tokens_of(order[i]), held.extra) != order[i]) return "a block is not found from its parent";
        if (held.depth != block(held.parent).depth + 1) return "a block has a wrong depth";
        if (refs[held.parent]++ == 0) order.push_back(held.parent);
    }
    std::size_t blocks = 0;
    for (const BlockId id : order) {
        if (block(id).refs != refs[id]) return "block " + std::to_string(id) + " miscounts its references";
        blocks += block(id).parent == 0 ? 0 : 1;
    }
    if (blocks != num_blocks_ || fresh_ != 1 + order.size() + num_free_) return "blocks have leaked";
    if (scopes_.size() != order.size() - blocks) return "scopes have leaked";
    return "";
}

}  // namespace poolweave
