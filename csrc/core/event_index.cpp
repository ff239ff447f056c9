#include "core/event_index.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "core/error.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

namespace {

constexpr std::uint64_t kMix = 0x9E3779B97F4A7C15u;
constexpr std::size_t kAhead = 8;  // blocks whose table slots are fetched while others are stored

constexpr std::uint32_t floor_log2(std::size_t value) { return static_cast<std::uint32_t>(std::bit_width(value)) - 1; }

}  // namespace

EventIndex::EventIndex(std::uint32_t block_tokens)
    : block_tokens_(block_tokens),
      chunk_bits_(std::min(kMostChunkBits, floor_log2(kChunkTokens / std::max(block_tokens, 1u)))),
      trusted_(1) {
    if (block_tokens == 0 || block_tokens > (1u << 20)) {
        throw Error(Code::kConfig, "block_tokens=" + std::to_string(block_tokens) + " is not between 1 and 2**20");
    }
}

// --- sources -----------------------------------------------------------------------------------------------

EventIndex::Source& EventIndex::live_source(std::uint32_t source) {
    return const_cast<Source&>(std::as_const(*this).live_source(source));
}

const EventIndex::Source& EventIndex::live_source(std::uint32_t source) const {
    if (source >= sources_.size() || !sources_[source].live) {
        throw Error(Code::kConfig, "no event source has slot " + std::to_string(source));
    }
    return sources_[source];
}

std::uint32_t EventIndex::add_source(const SourceRules& rules) {
    const std::unique_lock guard(lock_);
    const auto idle = std::find_if(sources_.begin(), sources_.end(), [](const Source& s) { return !s.live; });
    const auto slot = static_cast<std::uint32_t>(idle - sources_.begin());
    if (slot / 64 >= words_) widen(words_ * 2);
    if (idle == sources_.end()) sources_.emplace_back();
    Source& source = sources_[slot];
    source.live = true;
    source.rules = rules;
    trusted_[slot / 64] |= std::uint64_t{1} << slot % 64;
    return slot;
}

void EventIndex::drop_source(std::uint32_t source) {
    const std::unique_lock guard(lock_);
    live_source(source);
    forget(source);
    sources_[source] = Source{};
    trusted_[source / 64] &= ~(std::uint64_t{1} << source % 64);
}

void EventIndex::set_trusted(std::uint32_t source, bool trusted) {
    const std::unique_lock guard(lock_);
    live_source(source);
    const std::uint64_t bit = std::uint64_t{1} << source % 64;
    trusted_[source / 64] = trusted ? trusted_[source / 64] | bit : trusted_[source / 64] & ~bit;
}

void EventIndex::clear(std::uint32_t source) {
    const std::unique_lock guard(lock_);
    live_source(source);
    forget(source);
}

// More bits a block: every chunk's holders are laid out anew.
void EventIndex::widen(std::size_t words) {
    std::vector<PageArray<std::uint64_t>> wider;
    for (const Chunk& chunk : chunks_) {
        wider.emplace_back(chunk_size() * words, !wider.empty());
        const std::size_t used = std::min<std::size_t>(chunk_size(), fresh_ - (wider.size() - 1) * chunk_size());
        for (std::size_t i = 0; i < used; ++i) std::copy_n(&chunk.holders[i * words_], words_, &wider.back()[i * words]);
    }
    trusted_.resize(words);
    for (std::size_t i = 0; i < chunks_.size(); ++i) chunks_[i].holders = std::move(wider[i]);
    words_ = words;
}

void EventIndex::forget(std::uint32_t slot) noexcept {
    Source& source = sources_[slot];
    source.held.each([&](const HeldTable::Entry& entry) {
        holders_of(entry.block)[slot / 64] &= ~(std::uint64_t{1} << slot % 64);
        release(entry.block);
    });
    source.held.clear();
}

// --- blocks ------------------------------------------------------------------------------------------------

std::uint32_t EventIndex::bucket(BlockId parent, const std::int32_t* tokens, std::uint32_t extra) const noexcept {
    const std::uint64_t seed = (std::uint64_t{extra} << 32 | parent) * kMix;
    return static_cast<std::uint32_t>(XXH3_64bits_withSeed(tokens, block_tokens_ * sizeof(std::int32_t), seed));
}

bool EventIndex::is(BlockId id, BlockId parent, const std::int32_t* tokens, std::uint32_t extra) const noexcept {
    const Block& candidate = block(id);
    return candidate.parent == parent && candidate.extra == extra &&
           std::memcmp(tokens_of(id), tokens, block_tokens_ * sizeof(std::int32_t)) == 0;
}

EventIndex::BlockId EventIndex::find(BlockId parent, const std::int32_t* tokens, std::uint32_t extra) const noexcept {
    const Block& above = block(parent);
    if (above.first_child != 0 && is(above.first_child, parent, tokens, extra)) return above.first_child;
    if (above.other_children == 0) return 0;
    const auto* entry = children_.find(bucket(parent, tokens, extra), [&](BlockId id) { return is(id, parent, tokens, extra); });
    return entry == nullptr ? 0 : entry->value;
}

// Pages of the first chunk are taken one by one, so that a small index stays small.
void EventIndex::add_chunk() {
    const bool large = !chunks_.empty();
    chunks_.push_back({{chunk_size(), large}, {chunk_size() * block_tokens_, large}, {chunk_size() * words_, large}});
}

EventIndex::BlockId EventIndex::allocate() {
    BlockId id = free_;
    if (id == 0) {
        if (fresh_ == chunks_.size() << chunk_bits_) add_chunk();
        return fresh_++;  // pages begin as zeros
    }
    free_ = block(id).parent;
    --num_free_;
    block(id) = Block{};
    std::fill_n(holders_of(id), words_, 0);
    return id;
}

void EventIndex::give_back(BlockId id) noexcept {
    block(id).parent = free_;
    free_ = id;
    ++num_free_;
}

// A new block that nobody refers to yet.
EventIndex::BlockId EventIndex::make(BlockId parent, const std::int32_t* tokens, std::uint32_t extra) {
    const BlockId id = allocate();
    Block& above = block(parent);
    block(id) = Block{parent, 0, 0, 0, above.depth + 1, extra};
    std::memcpy(tokens_of(id), tokens, block_tokens_ * sizeof(std::int32_t));
    ++above.refs;
    if (above.first_child == 0) {
        above.first_child = id;
    } else {
        children_.insert(bucket(parent, tokens, extra), id);
        ++above.other_children;
    }
    if (extra != 0) ++extra_list_[extra - 1].refs;
    ++num_blocks_;
    return id;
}

void EventIndex::unlink(BlockId id) noexcept {
    Block& above = block(block(id).parent);
    if (above.first_child == id) {
        above.first_child = 0;
        return;
    }
    const std::uint32_t hash = bucket(block(id).parent, tokens_of(id), block(id).extra);
    children_.erase(children_.find(hash, [id](BlockId candidate) { return candidate == id; }));
    --above.other_children;
}

// One reference less; what nobody refers to goes, and so on upward.
void EventIndex::release(BlockId id) noexcept {
    while (--block(id).refs == 0) {
        const Block& gone = block(id);
        const BlockId parent = gone.parent;
        if (parent == 0) {
            const auto name = scope_names_.find(id);
            scopes_.erase(name->second);
            scope_names_.erase(name);
        } else {
            unlink(id);
            release_extra(gone.extra);
            --num_blocks_;
        }
        give_back(id);
        if (parent == 0) return;
        id = parent;
    }
}

EventIndex::BlockId EventIndex::root_of(const std::string& scope) {
    if (const auto found = scopes_.find(scope); found != scopes_.end()) return found->second;
    const BlockId id = allocate();
    scopes_.emplace(scope, id);
    scope_names_.emplace(id, scope);
    return id;
}

// Extra keys are interned, and kept while a block has them.
std::uint32_t EventIndex::extra_of(std::string_view raw) {
    if (raw.empty()) return 0;
    if (const auto found = extras_.find(std::string(raw)); found != extras_.end()) return found->second;
    if (free_extras_.empty()) {
        extra_list_.emplace_back();
        free_extras_.reserve(extra_list_.size());
        free_extras_.push_back(static_cast<std::uint32_t>(extra_list_.size()));
    }
    const std::uint32_t id = free_extras_.back();
    extras_.emplace(std::string(raw), id);
    free_extras_.pop_back();
    extra_list_[id - 1] = {std::string(raw), 0};
    return id;
}

void EventIndex::release_extra(std::uint32_t id) noexcept {
    if (id == 0) return;
    --extra_list_[id - 1].refs;
    settle_extra(id);
}

void EventIndex::settle_extra(std::uint32_t id) noexcept {
    if (id == 0 || extra_list_[id - 1].refs > 0 || extra_list_[id - 1].raw.empty()) return;
    extras_.erase(extra_list_[id - 1].raw);
    extra_list_[id - 1].raw.clear();
    free_extras_.push_back(id);
}

// --- events ------------------------------------------------------------------------------------------------

EventReport EventIndex::apply(std::uint32_t source, std::string_view payload) {
    const KvEventBatch batch = decode_kv_events(payload);
    EventReport report;
    report.timestamp = batch.timestamp;
    const std::unique_lock guard(lock_);
    live_source(source);
    for (const KvEvent& event : batch.events) {
        if (event.type == KvEventType::kStored) store(source, event, report);
        if (event.type == KvEventType::kRemoved) remove(source, event, report);
        if (event.type == KvEventType::kCleared) {
            forget(source);
            ++report.clears;
        }
    }
    return report;
}

bool EventIndex::fits(Source& source, const KvEvent& event, EventReport& report) const {
    const std::size_t count = event.hashes.size();
    if (source.has_group && source.group != event.group) report.several_groups = true;
    source.group = source.has_group ? source.group : event.group;
    source.has_group = true;
    const bool whole = event.block_size == block_tokens_ && event.tokens.size() == count * block_tokens_;
    if (!whole || event.group != source.group) {
        report.skipped += count;
        return false;
    }
    if (source.held.size() + count > source.rules.max_blocks) {
        report.refused += count;
        return false;
    }
    return true;
}

void EventIndex::store(std::uint32_t slot, const KvEvent& event, EventReport& report) {
    Source& source = sources_[slot];
    const std::size_t count = event.hashes.size();
    if (!fits(source, event, report) || count == 0) return;
    const HeldTable::Entry* before = event.parent ? source.held.find(*event.parent) : nullptr;
    if (event.parent && before == nullptr) {
        report.orphans += count;
        return;
    }
    BlockId parent = event.parent ? before->block : 0;
    reserve(source, count);
    intern_extras(event);
    if (!event.parent) parent = root_of(event.scope);
    ++block(parent).refs;  // whatever happens below, it stays until the end of this call
    const BlockId start = parent;
    for (std::size_t i = 0; i < std::min(count, kAhead); ++i) source.held.prefetch(event.hashes[i]);
    for (std::size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) source.held.prefetch(event.hashes[i + kAhead]);
        const std::int32_t* tokens = event.tokens.data() + i * block_tokens_;
        const std::uint32_t extra = i < extras_of_event_.size() ? extras_of_event_[i] : 0;
        BlockId id = find(parent, tokens, extra);
        if (id == 0) id = make(parent, tokens, extra);
        if (!hold(slot, event.hashes[i], id, event.medium, report)) {
            report.orphans += count - i - 1;
            break;
        }
        parent = id;
    }
    for (const std::uint32_t extra : extras_of_event_) settle_extra(extra);
    release(start);
}

// Takes beforehand all memory that `count` more blocks of a source may need.
void EventIndex::reserve(Source& source, std::size_t count) {
    source.held.reserve(count);
    children_.reserve(count);
    while (num_free_ + (chunks_.size() << chunk_bits_) < fresh_ + count + 1) add_chunk();
}

void EventIndex::intern_extras(const KvEvent& event) {
    extras_of_event_.clear();
    for (const std::string_view raw : event.extra_keys) extras_of_event_.push_back(extra_of(raw));
}

// False when the hash already names another block; `id` then goes unless somebody else refers to it.
bool EventIndex::hold(std::uint32_t slot, std::uint64_t hash, BlockId id, Medium medium, EventReport& report) {
    Source& source = sources_[slot];
    HeldTable::Entry& entry = source.held.claim(hash);
    if (entry.block == 0) {
        source.held.settle(entry, hash, id);
        ++block(id).refs;
        ++report.stored;
    } else if (entry.block == id) {
        ++report.repeated;
    } else {
        ++block(id).refs;
        release(id);
        ++report.conflicts;
        return false;
    }
    const auto kind = static_cast<std::size_t>(medium);
    if (entry.copies[kind] < 255) ++entry.copies[kind];
    const std::uint64_t counts = source.rules.credited_media >> kind & 1;
    holders_of(id)[slot / 64] |= counts << slot % 64;
    return true;
}

void EventIndex::credit(std::uint32_t slot, const HeldTable::Entry& entry) noexcept {
    bool counts = false;
    for (std::size_t i = 0; i < kMedia; ++i) {
        counts |= entry.copies[i] > 0 && (sources_[slot].rules.credited_media >> i & 1) != 0;
    }
    std::uint64_t& word = holders_of(entry.block)[slot / 64];
    const std::uint64_t bit = std::uint64_t{1} << slot % 64;
    word = counts ? word | bit : word & ~bit;
}

void EventIndex::remove(std::uint32_t slot, const KvEvent& event, EventReport& report) {
    Source& source = sources_[slot];
    if (source.has_group && event.group != source.group) return;
    const auto medium = static_cast<std::size_t>(event.medium);
    for (std::size_t i = 0; i < event.hashes.size(); ++i) {
        if (i + kAhead < event.hashes.size()) source.held.prefetch(event.hashes[i + kAhead]);
        HeldTable::Entry* entry = source.held.find(event.hashes[i]);
        if (entry == nullptr || entry->copies[medium] == 0) {
            ++report.unknown;
            continue;
        }
        const bool several = entry->copies[medium] > 1;
        if (several && !source.rules.counts_copies) ++report.doubtful;
        const bool counted = several && source.rules.counts_copies && entry->copies[medium] < 255;
        entry->copies[medium] = counted ? static_cast<std::uint8_t>(entry->copies[medium] - 1) : 0;
        credit(slot, *entry);
        if (std::any_of(std::begin(entry->copies), std::end(entry->copies), [](std::uint8_t n) { return n > 0; })) continue;
        const BlockId id = entry->block;
        source.held.erase(entry);
        release(id);
        ++report.removed;
    }
}

}  // namespace poolweave
