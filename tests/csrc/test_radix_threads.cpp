// The radix tree under threads: readers run beside a writer that inserts, evicts, pins and expires; no answer is torn.
// Run under TSan (`make tsan`) this also proves the locking.
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/radix_tree.hpp"

using namespace poolweave;

namespace {

constexpr std::size_t kBlock = 4;
constexpr std::size_t kPrompts = 64;
constexpr int kRounds = 15'000;

// Prompts share heads in groups of eight. The payload of a block is a function of its tokens, so a reader can tell a
// right answer from a torn one whatever was evicted meanwhile.
std::vector<std::int32_t> prompt(std::size_t which) {
    std::vector<std::int32_t> tokens;
    const std::size_t blocks = 8 + which % 7 * 5;
    for (std::size_t i = 0; i < blocks * kBlock; ++i) {
        const std::size_t source = i < 6 * kBlock ? which / 8 : which;
        tokens.push_back(static_cast<std::int32_t>(source * 1000 + i));
    }
    return tokens;
}

PayloadList payloads_of(const std::vector<std::int32_t>& tokens) {
    PayloadList payloads;
    for (std::size_t i = 0; i < tokens.size(); i += kBlock) payloads.push_back(static_cast<std::uint64_t>(tokens[i]) * 31 + i);
    return payloads;
}

void right(const Match& found, const PayloadList& all) {
    CHECK(found.blocks.size() <= all.size() && found.num_tokens == found.blocks.size() * kBlock);
    CHECK(std::equal(found.blocks.begin(), found.blocks.end(), all.begin()));
    CHECK((found.miss_reason == MissReason::kNone) == (found.blocks.size() == all.size()));
}

void readers_beside_a_writer(const char* eviction) {
    RadixTree tree({.block_tokens = kBlock, .max_bytes = 128 << 10, .ttl_ns = 1'000'000, .eviction = eviction});
    std::vector<std::vector<std::int32_t>> prompts;
    std::vector<PayloadList> payloads;
    for (std::size_t i = 0; i < kPrompts; ++i) {
        prompts.push_back(prompt(i));
        payloads.push_back(payloads_of(prompts.back()));
    }
    std::atomic<std::int64_t> clock{0};
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> hits{0};
    const auto read = [&](unsigned seed) {
        std::mt19937 random(seed);
        do {
            const std::size_t i = random() % kPrompts;
            const Match found = tree.match(prompts[i], 0, {clock.load(), random() % 50 == 0, random() % 4 != 0});
            right(found, payloads[i]);
            if (found.pinned != kNoNode) tree.unpin(found.pinned);
            hits.fetch_add(found.blocks.size());
        } while (!done.load());
    };
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= 3; ++seed) threads.emplace_back(read, seed);
    std::mt19937 random(9);
    for (int round = 0; round < kRounds; ++round) {
        const std::size_t i = random() % kPrompts;
        const std::int64_t now = clock.fetch_add(1000);
        tree.insert(prompts[i], payloads[i], 0, {now, static_cast<std::uint8_t>(i % 3)});
        if (round % 7 == 0) tree.evict(random() % 40);
        if (round % 31 == 0) tree.remove(prompts[random() % kPrompts], 0);
        if (round % 101 == 0) tree.expire(now);
        if (round % 401 == 0) tree.mark(prompts[i], 0, MissReason::kInFlight);
        if (round % 97 == 0) CHECK(tree.check().empty());
    }
    done.store(true);
    for (std::thread& thread : threads) thread.join();
    CHECK(tree.check().empty() && tree.stats().pinned_blocks == 0);
    CHECK(hits.load() > 0 && tree.stats().lookups > 3);
}

}  // namespace

int main() {
    for (const char* eviction : {"lru", "arc", "cost-aware"}) readers_beside_a_writer(eviction);
    return 0;
}
