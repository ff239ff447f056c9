// The prompt tree without Python: a seeded mix of all calls under a cap, invariants after each (ASan, UBSan).
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/block_keys.hpp"
#include "core/error.hpp"
#include "core/key_table.hpp"
#include "core/lowest.hpp"
#include "core/prompt_tree.hpp"

using poolweave::KeyTable;
using poolweave::PromptTree;

namespace {

std::vector<std::uint64_t> keys_of(std::mt19937& random, std::size_t longest) {
    std::vector<std::int32_t> tokens(1 + random() % longest);
    for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random() % 3);
    std::vector<std::uint64_t> keys(tokens.size());
    poolweave::block_keys(tokens, 1, 0, keys);
    return keys;
}

void table_keeps_what_it_was_given() {
    KeyTable table;
    const auto any = [](std::uint32_t) { return true; };
    for (std::uint32_t i = 0; i < 10'000; ++i) table.insert(std::uint64_t{i} << 20, i);
    table.insert(5ull << 20, 77);  // the same key twice
    for (std::uint32_t i = 0; i < 10'000; ++i) {
        CHECK(table.find(std::uint64_t{i} << 20, [&](std::uint32_t v) { return v == i; }) == i);
    }
    CHECK(table.find(5ull << 20, [](std::uint32_t v) { return v == 77; }) == 77);
    CHECK(table.replace(5ull << 20, 77, 78) && !table.replace(5ull << 20, 77, 79));
    CHECK(table.erase(5ull << 20, 78) && !table.erase(5ull << 20, 78));
    for (std::uint32_t i = 0; i < 10'000; i += 2) CHECK(table.erase(std::uint64_t{i} << 20, i));
    for (std::uint32_t i = 1; i < 10'000; i += 2) {
        CHECK(table.find(std::uint64_t{i} << 20, [&](std::uint32_t v) { return v == i; }) == i);
    }
    CHECK(table.find(4ull << 20, [](std::uint32_t v) { return v == 4; }) == KeyTable::kNone);
    for (std::uint32_t i = 1; i < 10'000; i += 2) CHECK(table.erase(std::uint64_t{i} << 20, i));
    CHECK(table.size() == 0);
    const std::size_t before = table.nbytes();
    table.shrink();
    CHECK(table.nbytes() < before && table.find(0, any) == KeyTable::kNone);
}

void random_calls(std::size_t max_bytes) {
    std::mt19937 random(1);
    PromptTree tree(max_bytes);
    double now = 0;
    std::vector<std::int32_t> scores(8);
    for (int step = 0; step < 4'000; ++step) {
        const std::vector<std::uint64_t> keys = keys_of(random, step % 50 == 0 ? 6'000 : 12);
        const std::uint32_t slot = random() % 8;
        const std::size_t cut = random() % keys.size();
        switch (random() % 8) {
            case 0: tree.remove({&keys.back(), 1}, slot, now); break;
            case 1: if (random() % 10 == 0) tree.retire(slot); break;
            case 2: now += 0.1; break;
            case 3: tree.sweep(now, 10); break;
            case 4:
                if (cut > 0) tree.insert(std::span(keys).subspan(cut), slot, now + 1, now, keys[cut - 1]);
                break;
            default: {
                const std::size_t held = tree.insert(keys, slot, now + 1 + static_cast<double>(random() % 3), now);
                CHECK(held <= keys.size());
                CHECK(tree.match(keys, now, scores) == held && static_cast<std::size_t>(scores[slot]) == held);
            }
        }
        CHECK(tree.stats().nbytes <= max_bytes);
        if (step % 20 == 0) tree.check();
    }
    for (int i = 0; i < 4; ++i) tree.sweep(now + 100, 1'000'000);
    tree.check();
    CHECK(tree.stats().entries == 0 && tree.stats().nodes == 0);
}

void limits_are_kept() {
    PromptTree tree;
    std::mt19937 random(2);
    std::vector<std::int32_t> scores(1);
    tree.limit(0, 50);
    for (int i = 0; i < 400; ++i) {
        const std::vector<std::uint64_t> keys = keys_of(random, 30);
        CHECK(tree.insert(keys, 0, 1e9, 0) == keys.size());
        CHECK(tree.match(keys, 0, scores) == keys.size());
        tree.check();
    }
    tree.sweep(0, 10'000);
    tree.check();
    CHECK(tree.entries(0) < 400);
}

void lots_fall_on_the_lowest() {
    const std::vector<double> costs{2.0, 1.0, 3.0, 1.0 + 1e-12, 1.1};
    CHECK(poolweave::draw_lowest(costs, 0) == 1 && poolweave::draw_lowest(costs, 1) == 3);
    CHECK(poolweave::draw_lowest(costs, 2) == 1);
    CHECK(poolweave::draw_lowest(std::vector<double>{-1.0, -2.0}, 7) == 1);
}

void negative_tokens_are_seen() {
    std::vector<std::int32_t> tokens(100, 5);
    CHECK(!poolweave::any_negative(tokens) && !poolweave::any_negative({}));
    tokens[99] = -1;
    CHECK(poolweave::any_negative(tokens));
}

void threads_share_a_tree() {
    PromptTree tree;
    std::vector<std::thread> threads;
    for (std::uint32_t slot = 0; slot < 3; ++slot) {
        threads.emplace_back([&tree, slot] {
            std::mt19937 random(slot);
            std::vector<std::int32_t> scores(3);
            for (int i = 0; i < 500; ++i) {
                const std::vector<std::uint64_t> keys = keys_of(random, 20);
                CHECK(tree.insert(keys, slot, 1e9, 0) == keys.size());
                tree.match(keys, 0, scores);
                CHECK(static_cast<std::size_t>(scores[slot]) == keys.size());
                if (i % 50 == 0) tree.retire(slot);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    tree.check();
}

}  // namespace

int main() {
    table_keeps_what_it_was_given();
    random_calls(1 << 26);
    random_calls(70'000);
    limits_are_kept();
    lots_fall_on_the_lowest();
    negative_tokens_are_seen();
    threads_share_a_tree();
    CHECK_THROWS(PromptTree().retire(70'000), poolweave::Code::kConfig);
    return 0;
}
