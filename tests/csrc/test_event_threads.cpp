// The event index under threads: matches run beside writers that store, remove, clear, come and go; no score is torn.
// Run under TSan (`make tsan`) this also proves the locking.
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/event_index.hpp"
#include "kv_event_bytes.hpp"

using namespace poolweave;

namespace {

constexpr std::size_t kPrompts = 8;
constexpr std::size_t kBlocks = 12;  // of a prompt; the first half of all prompts is the same
constexpr int kRounds = 1'500;
constexpr int kWriters = 2;

std::uint64_t token(std::size_t prompt, std::size_t i) { return i < kBlocks ? 500 + i : 1000 * (prompt + 1) + i; }
std::uint64_t hash(std::size_t prompt, std::size_t block) { return (block < kBlocks / 2 ? 1 : 100 * (prompt + 1)) + block; }

// Blocks [first, end) of a prompt, as a source stores them.
std::string store(std::size_t prompt, std::size_t first, std::size_t end) {
    Stored event;
    for (std::size_t block = first; block < end; ++block) {
        event.hashes.push_back(hash(prompt, block));
        event.tokens.insert(event.tokens.end(), {token(prompt, 2 * block), token(prompt, 2 * block + 1)});
    }
    if (first > 0) event.parent = number(hash(prompt, first - 1));
    return event;
}

// Each source stores a prompt whole, or takes all that it does not share away: never a score between.
void write(EventIndex& index, std::uint32_t source, unsigned seed) {
    std::mt19937 random(seed);
    index.apply(source, batch({store(0, 0, kBlocks / 2)}));
    for (int round = 0; round < kRounds; ++round) {
        const std::size_t prompt = random() % kPrompts;
        std::vector<std::uint64_t> own;
        for (std::size_t block = kBlocks; block-- > kBlocks / 2;) own.push_back(hash(prompt, block));
        const bool take = random() % 2 == 0;
        index.apply(source, batch({take ? removed(own) : store(prompt, kBlocks / 2, kBlocks)}));
        if (round % 100 == 0) index.apply(source, batch({cleared(), store(0, 0, kBlocks / 2)}));
        if (round % 50 == 0) CHECK(index.inventory(source).size() <= kPrompts + 1 && index.check().empty());
    }
}

void come_and_go(EventIndex& index, const std::atomic<bool>& done) {
    std::vector<std::uint32_t> slots;
    do {
        for (int i = 0; i < 70; ++i) slots.push_back(index.add_source({}));  // more than one word of them
        for (const std::uint32_t slot : slots) index.apply(slot, batch({store(3, 0, kBlocks)}));
        for (const std::uint32_t slot : slots) index.drop_source(slot);
        slots.clear();
    } while (!done.load());
}

void read(const EventIndex& index, const std::atomic<bool>& done, std::atomic<std::uint64_t>& hits, unsigned seed) {
    std::mt19937 random(seed);
    do {
        const std::size_t prompt = random() % kPrompts;
        std::vector<std::int32_t> tokens;
        for (std::size_t i = 0; i < 2 * kBlocks; ++i) tokens.push_back(static_cast<std::int32_t>(token(prompt, i)));
        std::vector<std::int32_t> scores(index.num_slots());
        index.match(tokens, "", {}, scores);
        for (std::size_t slot = 0; slot < scores.size(); ++slot) {
            CHECK(scores[slot] == 0 || scores[slot] == static_cast<int>(kBlocks / 2) || scores[slot] == static_cast<int>(kBlocks));
            hits.fetch_add(static_cast<std::uint64_t>(scores[slot]));
        }
    } while (!done.load());
}

}  // namespace

int main() {
    EventIndex index(2);
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> hits{0};
    std::vector<std::thread> writers, others;
    for (unsigned i = 0; i < kWriters; ++i) {
        const std::uint32_t source = index.add_source({});
        writers.emplace_back([&index, source, i] { write(index, source, i); });
    }
    for (unsigned i = 0; i < 2; ++i) others.emplace_back([&, i] { read(index, done, hits, 10 + i); });
    others.emplace_back([&] { come_and_go(index, done); });
    for (std::thread& thread : writers) thread.join();
    done.store(true);
    for (std::thread& thread : others) thread.join();
    CHECK(index.check().empty() && hits.load() > 0 && index.stats().num_sources == kWriters);
    for (std::uint32_t source = 0; source < kWriters; ++source) index.drop_source(source);
    CHECK(index.check().empty() && index.stats().num_blocks == 0);
    return 0;
}
