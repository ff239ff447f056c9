// The catalogue keeps index and table in step; an intake takes a small offer in whole, or leaves nothing of it.
#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"
#include "core/intake.hpp"
#include "core/offer_frame.hpp"

using namespace poolweave;

namespace {

constexpr std::size_t kBlock = 256, kSlots = 4;

// Four blocks of memory as tier 1, by name.
struct Side {
    std::vector<std::uint8_t> bytes = std::vector<std::uint8_t>(kBlock * kSlots);
    Tiers tiers{std::vector<std::uint8_t>{1}, std::vector<Grid>{grid()}};

    Grid grid() const {
        return {.base = reinterpret_cast<std::uintptr_t>(bytes.data()), .nbytes = bytes.size(), .slot_stride = kBlock,
                .plane_stride = kBlock, .row_stride = kBlock, .row_bytes = kBlock, .num_slots = kSlots, .num_planes = 1,
                .num_rows = 1};
    }
};

struct World {
    Side sender, receiver;
    std::shared_ptr<BlockTable> table = std::make_shared<BlockTable>(std::array<std::uint32_t, kTiers>{kSlots});
    RadixTree tree{RadixConfig{.block_tokens = 4}};
    Catalogue catalogue{table, tree};
    std::vector<std::uint64_t> words = std::vector<std::uint64_t>(8);
    Intake intake{catalogue, receiver.tiers, sender.tiers, words};
    std::vector<std::int32_t> tokens = std::vector<std::int32_t>(10);
    std::vector<std::uint8_t> tiers{1, 1, 1};
    std::vector<std::int32_t> slots{2, 0, 3};
    std::vector<std::uint64_t> sums;

    World() {
        std::iota(tokens.begin(), tokens.end(), 7);
        for (std::size_t i = 0; i < sender.bytes.size(); ++i) sender.bytes[i] = static_cast<std::uint8_t>(i / kBlock + 1);
        for (const std::int32_t slot : slots) sums.push_back(checksum(sender.bytes.data() + kBlock * static_cast<std::size_t>(slot), kBlock));
        words[5] = 13;  // 13 % 8
    }
    SmallOffer offer() const { return {{tokens, 0, slots.size(), 1, 0}, 2, 13, tiers, slots, sums}; }
    std::size_t free() const {
        table->check();
        CHECK(tree.check().empty());
        return table->counts(0).free;
    }
};

void an_offer_is_taken_in_whole() {
    World w;
    const TakenIn taken = w.intake.take(w.offer());
    CHECK(taken.done && taken.num_held == 0 && taken.num_calls == 1 && taken.blocks.size() == 3);
    const std::vector<std::uint8_t> wanted{3, 1, 4};
    for (std::size_t i = 0; i < 3; ++i) CHECK(w.receiver.bytes[kBlock * i] == wanted[i] && w.receiver.bytes[kBlock * (i + 1) - 1] == wanted[i]);
    CHECK(w.tree.num_blocks() == 2 && w.free() == 1);  // the half block is not indexed
    CHECK(w.catalogue.release(taken.blocks) == 3 && w.free() == 2);
    const TakenIn again = w.intake.take(w.offer());
    CHECK(again.done && again.num_held == 2 && again.blocks.size() == 3 && w.free() == 1);
}

template <typename Change>
void leaves_nothing(const Change& change, std::size_t available = 3) {
    World w;
    change(w);
    const TakenIn taken = w.intake.take(w.offer());
    CHECK(!taken.done && taken.blocks.empty() && taken.available == available);
    CHECK(w.free() == kSlots && w.tree.num_blocks() == 0);
}

void what_cannot_be_finished_leaves_nothing() {
    leaves_nothing([](World& w) { w.sums[2] ^= 1; });
    leaves_nothing([](World& w) { w.words[5] = 21; });
    leaves_nothing([](World& w) { w.slots[1] = kSlots; });
    leaves_nothing([](World& w) { w.tiers[0] = 2; });
    leaves_nothing([](World& w) { w.tokens[0] = -1; }, 0);
    World w;
    std::vector<std::uint64_t> held(2);
    CHECK(w.table->alloc(held, 1));
    CHECK(!w.intake.take(w.offer()).done && w.free() == 2);
}

void a_block_is_indexed_in_one_place() {
    World w;
    std::vector<std::uint64_t> blocks(2);
    CHECK(w.table->alloc(blocks, 1));
    w.table->seal(blocks);
    CHECK(w.catalogue.insert(w.tokens, blocks, 0).num_new == 2);
    CHECK(w.catalogue.insert(w.tokens, blocks, 0).duplicates.size() == 2);
    CHECK_THROWS(w.catalogue.insert(w.tokens, blocks, 1), Code::kConfig);
    std::swap(blocks[0], blocks[1]);
    CHECK_THROWS(w.catalogue.insert(w.tokens, blocks, 0), Code::kConfig);
    CHECK(w.catalogue.match(w.tokens, 0).blocks.size() == 2 && w.free() == 2);
}

std::string big_endian(std::uint64_t value, int width) {
    std::string out;
    for (int at = width - 1; at >= 0; --at) out += static_cast<char>(value >> 8 * at);
    return out;
}

std::string blob(std::string_view bytes) { return "\xc5" + big_endian(bytes.size(), 2) + std::string(bytes); }

template <class T>
std::string blob(const std::vector<T>& array) {
    return blob(std::string_view(reinterpret_cast<const char*>(array.data()), array.size() * sizeof(T)));
}

// An offer as transfer/messages.py writes it, field by field.
std::vector<std::string> fields(const World& w) {
    const std::string lease = "\xcb" + big_endian(std::bit_cast<std::uint64_t>(30.0), 8);
    return {"\xdc" + big_endian(18, 2), "\xa5offer", "\x0d", "\xcf" + big_endian(1ull << 62, 8), lease, blob(""), "\x03", "\x0a",
            blob(w.tiers), blob(w.slots), blob(w.sums), blob(std::string(16, 'i')), blob(std::string(16, 't')), blob(w.tokens), "\xc3", "\xc2", "\x01",
            std::string(1, 0), "\xc2"};
}

std::string join(const std::vector<std::string>& parts) { return std::accumulate(parts.begin(), parts.end(), std::string()); }

void an_offer_is_read_out_of_its_message() {
    const World w;
    const std::string message = join(fields(w));
    const auto read = read_offer(message, 3);
    CHECK(read && read->number == 13 && read->num_blocks == 3 && read->mask == 1 && read->identity == std::string(16, 'i'));
    CHECK(read->tenant == std::string(16, 't'));
    CHECK(read->tokens == w.tokens && read->tiers == w.tiers && read->slots == w.slots && read->checksums == w.sums);
    CHECK(!read_offer(message, 2));  // larger than asked for
    auto parts = fields(w);
    parts[12] = blob("");  // of nobody that was told
    const auto untold = read_offer(join(parts), 3);
    CHECK(untold && untold->tenant.empty() && untold->tokens == w.tokens);
}

void what_is_no_such_offer_is_not_read() {
    const World w;
    const auto without = [&](std::size_t field, const std::string& other) {
        auto parts = fields(w);
        parts[field] = other;
        CHECK(!read_offer(join(parts), 100));
    };
    without(0, "\xdc" + big_endian(17, 2));
    without(1, "\xa5ready");
    without(2, std::string(1, 0));                   // no number
    without(2, "\xff");                              // a negative one
    without(4, "\x1e");                              // a lease that is no float
    without(4, "\xcb" + big_endian(std::bit_cast<std::uint64_t>(0.0), 8));
    without(4, "\xcb" + big_endian(0x7ff8ull << 48, 8));  // nan
    without(5, blob("tag"));
    without(6, "\x04");                              // blocks
    without(7, "\x09");                              // tokens
    without(8, blob("\x01\x01"));
    without(9, blob("\x01\x01\x01"));               // no int32
    without(10, blob(std::string(8, 'x')));
    without(11, blob(std::string(15, 'i')));
    without(12, blob(std::string(17, 't')));
    without(12, "\x01");                             // a tenant that is no bytes
    without(13, "\xc0");                             // no tokens
    without(14, "\xc2");                             // not to be indexed
    without(15, "\xc3");                             // private
    without(16, std::string(1, 0));                  // nowhere on demand
    without(16, "\x04");
    without(17, "\x01");                             // reserved
    without(18, "\xc3");                             // growing
    without(18, "\xc2\xc2");                        // more than an offer
}

// Cut or altered anywhere, it is read as what it says then, or not at all; the sanitizers see the rest.
void damaged_messages_are_read_safely() {
    const World w;
    const std::string whole = join(fields(w));
    for (std::size_t end = 0; end < whole.size(); ++end) CHECK(!read_offer(whole.substr(0, end), 100));
    std::mt19937 random(1);
    for (int round = 0; round < 20'000; ++round) {
        std::string message = whole;
        for (unsigned i = 1 + random() % 3; i > 0; --i) message[random() % message.size()] = static_cast<char>(random());
        const auto read = read_offer(message, 100);
        if (!read) continue;
        CHECK(read->num_blocks == read->tiers.size() && read->num_blocks == read->slots.size());
        CHECK(read->checksums.empty() || read->checksums.size() == read->num_blocks);
        CHECK(read->tenant.empty() || read->tenant.size() == 16);
    }
}

}  // namespace

int main() {
    an_offer_is_taken_in_whole();
    what_cannot_be_finished_leaves_nothing();
    a_block_is_indexed_in_one_place();
    an_offer_is_read_out_of_its_message();
    what_is_no_such_offer_is_not_read();
    damaged_messages_are_read_safely();
    return 0;
}
