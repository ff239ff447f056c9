// KV events as vLLM 0.32 and SGLang 0.5.23 publish them, decoded from msgpack.
//
// A batch is [timestamp, [event, ...], rank]; an event is a map whose "type" names it. Fields that are not known here
// are passed over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace poolweave {

// Where an instance holds a block, from nearest to farthest.
enum class Medium : std::uint8_t { kHbm = 0, kDram = 1, kOther = 2 };
inline constexpr std::size_t kMedia = 3;

enum class KvEventType : std::uint8_t { kStored, kRemoved, kCleared, kUnknown };

struct KvEvent {
    KvEventType type = KvEventType::kUnknown;
    std::vector<std::uint64_t> hashes;
    std::optional<std::uint64_t> parent;
    std::vector<std::int32_t> tokens;
    bool plain_tokens = true;                  // false: token_ids held other things than ids, and `tokens` is empty
    std::uint64_t block_size = 0;
    Medium medium = Medium::kHbm;              // what is not said is on the device
    std::string scope;                         // adapter and salt in one exact encoding; empty without both
    std::vector<std::string_view> extra_keys;  // a block's raw msgpack, empty for nil; none at all when not given
    std::uint64_t group = 0;
};

struct KvEventBatch {
    double timestamp = 0;
    std::vector<KvEvent> events;               // views into the payload that was decoded
};

// Throws Error(kMalformed) with the byte at which `payload` stops making sense. Memory at most 24 times the payload.
KvEventBatch decode_kv_events(std::string_view payload);

// The scope of an adapter and a salt, as decode_kv_events builds it.
std::string kv_event_scope(std::optional<std::string_view> adapter, std::optional<std::string_view> salt);

}  // namespace poolweave
