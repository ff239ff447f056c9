// KV events: the decoder against hostile bytes, the event index against what sources may say.
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/error.hpp"
#include "core/event_index.hpp"
#include "core/event_stream.hpp"
#include "kv_event_bytes.hpp"

using namespace poolweave;

namespace {

struct Fixture {
    EventIndex index{2};
    std::uint32_t source;
    explicit Fixture(SourceRules rules = {}) : source(index.add_source(rules)) {}
    EventReport apply(const std::vector<std::string>& events) {
        const EventReport report = index.apply(source, batch(events));
        CHECK(index.check().empty());
        return report;
    }
    int held(const std::vector<std::int32_t>& tokens, const std::string& scope = "", const std::vector<std::string_view>& extra = {}) {
        std::vector<std::int32_t> scores(index.num_slots());
        index.match(tokens, scope, extra, scores);
        return scores[source];
    }
};

const std::vector<std::int32_t> kPrompt = {1, 2, 3, 4, 5, 300};

void follows_stores_and_removals() {
    Fixture f;
    CHECK(f.apply({Stored{{10, 11}, {1, 2, 3, 4}}}).stored == 2 && f.held(kPrompt) == 2);
    CHECK(f.apply({Stored{{12}, {5, 300}, number(11)}}).timestamp == 1.5 && f.held(kPrompt) == 3);
    CHECK(f.apply({Stored{{20}, {5, 300}, number(99)}}).orphans == 1);
    CHECK(f.apply({removed({11})}).removed == 1 && f.held(kPrompt) == 1);
    CHECK(f.apply({Stored{{11}, {3, 4}, number(10)}}).stored == 1 && f.held(kPrompt) == 3);  // what follows it was kept
    CHECK(f.apply({Stored{{11}, {3, 9}, number(10)}}).conflicts == 1 && f.held(kPrompt) == 3);
    CHECK(f.apply({removed({77})}).unknown == 1);
    CHECK(f.apply({cleared()}).clears == 1 && f.held(kPrompt) == 0 && f.index.stats().num_blocks == 0);
}

void knows_media_and_copies() {
    Fixture f;
    f.apply({Stored{{10}, {1, 2}}, Stored{{10}, {1, 2}, "\xc0", 2, "CPU"}, Stored{{11}, {3, 4}, number(10), 2, "STORAGE"}});
    CHECK(f.held(kPrompt) == 1);  // storage is not credited
    f.apply({removed({10})});
    CHECK(f.held(kPrompt) == 1);  // still in the second medium
    f.apply({Stored{{10}, {1, 2}, "\xc0", 2, "CPU_PINNED"}});
    CHECK(f.apply({removed({10}, "CPU")}).doubtful == 1 && f.held(kPrompt) == 0);
    Fixture copies({.counts_copies = true});
    copies.apply({Stored{{10}, {1, 2}}, Stored{{10}, {1, 2}}});
    CHECK(copies.apply({removed({10})}).doubtful == 0 && copies.held(kPrompt) == 1);
    copies.apply({removed({10})});
    CHECK(copies.held(kPrompt) == 0);
}

void keeps_scopes_and_extra_keys_apart() {
    Fixture f;
    const std::string extra = "\x92\x91" + text("image") + "\xc0";
    f.apply({Stored{{10, 11}, {1, 2, 3, 4}, "\xc0", 2, "GPU", {"lora_name", text("ad"), "extra_keys", "\x92\x91\xa2" "ad" "\xc0"}},
             Stored{{20, 21}, {1, 2, 3, 4}, "\xc0", 2, "GPU", {"cache_salt", text("s"), "extra_keys", extra}},
             Stored{{30}, {1, 2}, "\xc0", 2, "GPU", {"lora_id", number(7)}}});
    CHECK(f.held(kPrompt) == 0 && f.held(kPrompt, kv_event_scope("ad", {})) == 2 && f.held(kPrompt, kv_event_scope("#7", {})) == 1);
    const std::string image = "\x91" + text("image");
    CHECK(f.held(kPrompt, kv_event_scope({}, "s")) == 0 && f.held(kPrompt, kv_event_scope({}, "s"), {image}) == 2);
    CHECK(kv_event_scope("a", "b") != kv_event_scope("ab", "") && kv_event_scope("", {}) != kv_event_scope({}, ""));
    f.apply({cleared(), Stored{{1}, {1, 2}}});
    CHECK(f.held(kPrompt, kv_event_scope({}, "s"), {image}) == 0 && f.held(kPrompt, "", {image}) == 0);
}

void passes_over_what_is_no_prefix() {
    Fixture f({.max_blocks = 2});
    CHECK(f.apply({Stored{{10}, {1, 2, 3}, "\xc0", 3}}).skipped == 1);              // another block size
    CHECK(f.apply({Stored{{10, 11}, {1, 2}}}).skipped == 2);                        // tokens missing
    CHECK(f.apply({Stored{{10, 11, 12}, {1, 2, 3, 4, 5, 6}}}).refused == 3);        // above its share
    const std::string pairs = "\x82" + text("type") + text("BlockStored") + text("token_ids") + "\x91\x92\x01\x02";
    CHECK(f.apply({pairs, "\x81" + text("type") + text("SomethingNew")}).stored == 0);
    CHECK(f.apply({Stored{{10}, {1, 2}, "\xc0", 2, "GPU", {"group_idx", number(0), "new_field", "\x81\x01\x93\x01\x02\x03"}}}).stored == 1);
    CHECK(f.apply({Stored{{11}, {1, 2}, "\xc0", 2, "GPU", {"group_idx", number(1)}}}).several_groups);
}

void bytes_hashes_and_many_sources() {
    EventIndex index(2);
    std::vector<std::uint32_t> slots;
    for (int i = 0; i < 130; ++i) slots.push_back(index.add_source({}));
    const std::string hash = "\xc4\x20" + std::string(32, 'h');
    const std::string event = "\x85" + text("type") + text("BlockStored") + text("block_hashes") + "\x91" + hash + text("parent_block_hash") +
                              "\xc0" + text("token_ids") + numbers({1, 2}) + text("block_size") + number(2);
    for (const std::uint32_t slot : {0u, 64u, 129u}) index.apply(slots[slot], batch({event}));
    std::vector<std::int32_t> scores(index.num_slots());
    CHECK(index.match(kPrompt, "", {}, scores) == 1 && scores[0] == 1 && scores[64] == 1 && scores[129] == 1 && scores[1] == 0);
    index.set_trusted(64, false);
    index.match(kPrompt, "", {}, scores);
    CHECK(scores[64] == 0 && index.num_held(64) == 1);
    index.drop_source(129);
    CHECK_THROWS(index.apply(129, batch({event})), Code::kConfig);
    CHECK(index.add_source({}) == 129 && index.num_held(129) == 0 && index.check().empty());
}

void inventories_rebuild_the_same_index() {
    Fixture f;
    f.apply({Stored{{10, 11}, {1, 2, 3, 4}}, Stored{{12}, {5, 6}, number(11)}, Stored{{13}, {7, 8}, number(10)}});
    f.apply({Stored{{14}, {9, 9}, number(12)}, Stored{{14}, {9, 9}, number(12), 2, "CPU"}});
    f.apply({Stored{{20}, {1, 2}, "\xc0", 2, "GPU", {"cache_salt", text("s")}}});
    std::size_t blocks = 0;
    for (const StoredRun& run : f.index.inventory(f.source)) {
        CHECK(run.tokens.size() == run.hashes.size() * 2 && run.has_parent == (run.hashes[0] == 13 || run.hashes[0] == 14));
        CHECK(run.media == (run.hashes[0] == 14 ? 3 : 1));
        blocks += run.hashes.size();
    }
    CHECK(blocks == 6);
}

// Every prefix and every one-byte change of valid batches, and random bytes: an error or a batch, nothing else.
void survives_any_bytes() {
    Fixture f;
    const std::uint32_t bystander = f.index.add_source({});
    f.index.apply(bystander, batch({Stored{{1, 2, 3}, {1, 2, 3, 4, 5, 300}}}));
    const std::string good = batch({Stored{{10, 1u << 20}, {1, 200, 3, 70'000}, number(5), 2, "GPU", {"extra_keys", "\x92\xc0\x91\x01", "lora_id", number(3)}},
                                    removed({10}), cleared()});
    CHECK(decode_kv_events(good).events.size() == 3);
    std::mt19937_64 random(5);
    const auto tolerate = [&](const std::string& bytes) {
        try {
            f.index.apply(f.source, bytes);
        } catch (const Error& error) {
            CHECK(error.code() == Code::kMalformed && error.numbers().size() == 1);
        }
    };
    for (std::size_t length = 0; length < good.size(); ++length) {
        CHECK_THROWS(decode_kv_events(std::string_view(good).substr(0, length)), Code::kMalformed);
    }
    CHECK_THROWS(decode_kv_events(good + "\xc0"), Code::kMalformed);
    CHECK_THROWS(decode_kv_events("\xdd\xff\xff\xff\xff"), Code::kMalformed);
    for (std::size_t at = 0; at < good.size(); ++at) {
        for (int value = 0; value < 256; ++value) {
            std::string bytes = good;
            bytes[at] = static_cast<char>(value);
            tolerate(bytes);
        }
    }
    for (int i = 0; i < 20'000; ++i) {
        std::string bytes = i % 2 == 0 ? good : std::string(random() % 64, '\0');
        for (std::size_t changes = random() % 8 + 1; changes > 0 && !bytes.empty(); --changes) {
            bytes[random() % bytes.size()] = static_cast<char>(random());
        }
        tolerate(bytes);
    }
    tolerate(std::string(100'000, '\x91'));  // nested without end
    std::vector<std::int32_t> scores(f.index.num_slots());
    f.index.match(kPrompt, "", {}, scores);
    CHECK(f.index.check().empty() && scores[bystander] == 3 && f.index.num_held(bystander) == 3);
    f.index.clear(f.source);
    CHECK(f.index.stats().num_blocks == 3);
}

void streams_remember_the_last_batches() {
    Fixture f;
    EventStream stream(f.index, f.source);
    const std::string first = batch({Stored{{10, 11}, {1, 2, 3, 4}}}), orphan = batch({Stored{{20}, {5, 300}, number(99)}});
    CHECK(!stream.follow(first) && stream.next_sequence() == 1 && f.held(kPrompt) == 2);
    CHECK(stream.followed(0, first) && !stream.followed(0, orphan) && !stream.followed(1, first));
    CHECK_THROWS(stream.follow("\xc1"), Code::kMalformed);
    CHECK(stream.next_sequence() == 1 && stream.num_batches() == 2 && f.held(kPrompt) == 2);
    CHECK(stream.follow(orphan)->orphans == 1 && stream.follow(batch({cleared()}))->clears == 1);
    for (std::uint64_t i = 3; i < 4100; ++i) CHECK(!stream.follow(batch({removed({i})})));
    CHECK(!stream.followed(3, batch({removed({3})})) && stream.followed(4, batch({removed({4})})));
    CHECK(stream.followed(4099, batch({removed({4099})})) && !stream.followed(4099, batch({removed({4098})})));
    stream.begin_anew(7);
    CHECK(stream.next_sequence() == 7 && !stream.followed(4099, batch({removed({4099})})) && f.index.num_held(f.source) == 0);
    CHECK(!stream.follow(first) && stream.followed(7, first) && !stream.followed(6, first) && f.held(kPrompt) == 2);
    stream.set_trusted(false);
    CHECK(f.held(kPrompt) == 0);
}

}  // namespace

int main() {
    follows_stores_and_removals();
    knows_media_and_copies();
    keeps_scopes_and_extra_keys_apart();
    passes_over_what_is_no_prefix();
    bytes_hashes_and_many_sources();
    inventories_rebuild_the_same_index();
    streams_remember_the_last_batches();
    survives_any_bytes();
    return 0;
}
