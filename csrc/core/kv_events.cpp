#include "core/kv_events.hpp"

#include <algorithm>
#include <limits>

#include "core/msgpack_reader.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

namespace {

using Head = MsgpackReader::Head;
using Kind = MsgpackReader::Kind;

std::size_t array_size(MsgpackReader& in, const char* what) {
    const Head head = in.next();
    if (head.kind != Kind::kArray) in.fail(std::string(what) + " is no array");
    return head.size;
}

// A hash is an integer, or bytes of any length of which a 64-bit digest is kept.
std::uint64_t hash_of(MsgpackReader& in, const Head& head) {
    if (head.kind == Kind::kInt) return head.integer;
    if (head.kind == Kind::kBytes || head.kind == Kind::kText) return XXH3_64bits(head.text.data(), head.text.size());
    in.fail("a block hash is neither an integer nor bytes");
}

std::vector<std::uint64_t> read_hashes(MsgpackReader& in) {
    std::vector<std::uint64_t> hashes(array_size(in, "block_hashes"));
    for (std::size_t i = in.take_words(hashes.data(), hashes.size()); i < hashes.size();) {
        hashes[i++] = hash_of(in, in.next());
        i += in.take_words(hashes.data() + i, hashes.size() - i);
    }
    return hashes;
}

std::optional<std::uint64_t> read_parent(MsgpackReader& in) {
    const Head head = in.next();
    if (head.kind == Kind::kNil) return std::nullopt;
    return hash_of(in, head);
}

// Token pairs (speculative decoding) and the like are passed over: blocks of them are not prefixes of prompts.
void read_tokens(MsgpackReader& in, KvEvent& event) {
    const std::size_t size = array_size(in, "token_ids");
    event.tokens.resize(size);
    for (std::size_t i = in.take_tokens(event.tokens.data(), size); i < size; ) {
        const Head head = in.next();
        if (head.kind == Kind::kArray) {
            for (std::size_t left = head.size; left > 0; --left) in.skip();
            event.plain_tokens = false;
        } else if (head.kind == Kind::kInt && !head.negative && head.integer <= std::numeric_limits<std::int32_t>::max()) {
            event.tokens[i] = static_cast<std::int32_t>(head.integer);
        } else {
            in.fail("a token id that is not an integer from 0 to 2**31 - 1");
        }
        ++i;
        i += in.take_tokens(event.tokens.data() + i, size - i);
    }
    if (!event.plain_tokens) event.tokens.clear();
}

std::uint64_t read_count(MsgpackReader& in, const char* what) {
    const Head head = in.next();
    if (head.kind == Kind::kNil) return 0;
    if (head.kind != Kind::kInt || head.negative) in.fail(std::string(what) + " is no count");
    return head.integer;
}

std::optional<std::string_view> read_text(MsgpackReader& in, const char* what) {
    const Head head = in.next();
    if (head.kind == Kind::kNil) return std::nullopt;
    if (head.kind != Kind::kText) in.fail(std::string(what) + " is no text");
    return head.text;
}

Medium medium_of(std::optional<std::string_view> name) {
    if (!name || *name == "GPU") return Medium::kHbm;
    return *name == "CPU" || *name == "CPU_PINNED" ? Medium::kDram : Medium::kOther;
}

void read_extra_keys(MsgpackReader& in, KvEvent& event) {
    const Head head = in.next();
    if (head.kind == Kind::kNil) return;
    if (head.kind != Kind::kArray) in.fail("extra_keys is no array");
    const std::size_t nils = in.take_nils(head.size);
    if (nils == head.size) return;
    event.extra_keys.resize(head.size);
    for (std::size_t i = nils; i < head.size; ++i) {
        const std::size_t start = in.offset();
        in.skip();
        const std::string_view raw = in.since(start);
        if (raw != "\xc0") event.extra_keys[i] = raw;
    }
}

KvEventType type_of(std::string_view name) {
    if (name == "BlockStored") return KvEventType::kStored;
    if (name == "BlockRemoved") return KvEventType::kRemoved;
    if (name == "AllBlocksCleared") return KvEventType::kCleared;
    return KvEventType::kUnknown;
}

// The fields of an event that are put together when all are read.
struct Parts {
    std::optional<std::string_view> adapter, salt;
    std::uint64_t adapter_id = 0;
    bool has_id = false;
    bool typed = false;
};

void read_field(MsgpackReader& in, std::string_view name, KvEvent& event, Parts& names) {
    if (name == "type") {
        event.type = type_of(read_text(in, "type").value_or(""));
        names.typed = true;
    } else if (name == "block_hashes") {
        event.hashes = read_hashes(in);
    } else if (name == "parent_block_hash") {
        event.parent = read_parent(in);
    } else if (name == "token_ids") {
        read_tokens(in, event);
    } else if (name == "block_size") {
        event.block_size = read_count(in, "block_size");
    } else if (name == "medium") {
        event.medium = medium_of(read_text(in, "medium"));
    } else if (name == "extra_keys") {
        read_extra_keys(in, event);
    } else if (name == "group_idx") {
        event.group = read_count(in, "group_idx");
    } else if (name == "lora_name") {
        names.adapter = read_text(in, "lora_name");
    } else if (name == "cache_salt") {
        names.salt = read_text(in, "cache_salt");
    } else if (name == "lora_id") {
        const Head head = in.next();
        names.has_id = head.kind == Kind::kInt;
        names.adapter_id = head.integer;
        if (head.kind != Kind::kInt && head.kind != Kind::kNil) in.fail("lora_id is no integer");
    } else {
        in.skip();
    }
}

// The msgpack of [name].
std::string array_of(std::string_view name) {
    std::string raw = "\x91";
    if (name.size() < 32) {
        raw += static_cast<char>(0xa0 | name.size());
    } else if (name.size() < 256) {
        raw += {'\xd9', static_cast<char>(name.size())};
    } else {
        raw += {'\xda', static_cast<char>(name.size() >> 8), static_cast<char>(name.size())};
    }
    return raw.append(name);
}

KvEvent read_event(MsgpackReader& in) {
    const Head head = in.next();
    if (head.kind != Kind::kMap) in.fail("an event is no map");
    KvEvent event;
    Parts names;
    for (std::size_t i = 0; i < head.size; ++i) {
        const Head name = in.next();
        if (name.kind != Kind::kText) in.fail("a field's name is no text");
        read_field(in, name.text, event, names);
    }
    if (!names.typed) in.fail("an event without a type");
    std::string by_id = "#";
    by_id += std::to_string(names.adapter_id);
    if (names.has_id && !names.adapter) names.adapter = by_id;
    event.scope = kv_event_scope(names.adapter, names.salt);
    // vLLM repeats the adapter as every block's extra key: the scope says that already.
    if (names.adapter && !event.extra_keys.empty()) {
        const std::string implied = array_of(*names.adapter);
        std::replace(event.extra_keys.begin(), event.extra_keys.end(), std::string_view(implied), std::string_view());
    }
    return event;
}

}  // namespace

std::string kv_event_scope(std::optional<std::string_view> adapter, std::optional<std::string_view> salt) {
    if (!adapter && !salt) return {};
    std::string scope;
    for (const auto& part : {adapter, salt}) {
        scope += part ? std::to_string(part->size()) + ":" : "-";
        if (part) scope += *part;
    }
    return scope;
}

KvEventBatch decode_kv_events(std::string_view payload) {
    MsgpackReader in(payload);
    const std::size_t fields = array_size(in, "a batch");
    if (fields < 2) in.fail("a batch of fewer than two fields");
    KvEventBatch batch;
    const Head timestamp = in.next();
    if (timestamp.kind != Kind::kFloat && timestamp.kind != Kind::kInt) in.fail("a timestamp that is no number");
    batch.timestamp = timestamp.kind == Kind::kFloat ? timestamp.real : static_cast<double>(timestamp.integer);
    const std::size_t count = array_size(in, "events");
    for (std::size_t i = 0; i < count; ++i) {
        KvEvent event = read_event(in);
        if (event.type != KvEventType::kUnknown) batch.events.push_back(std::move(event));
    }
    for (std::size_t i = 2; i < fields; ++i) in.skip();
    if (!in.done()) in.fail("bytes after the batch");
    return batch;
}

}  // namespace poolweave
