// The radix tree: exactness, shape, order of victims, caps, and why lookups stop.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.hpp"
#include "core/error.hpp"
#include "core/radix_tree.hpp"

using namespace poolweave;

namespace {

using Prompt = std::vector<std::int32_t>;

// `count` blocks of 4 tokens; equal seeds give equal prompts.
Prompt prompt(std::int32_t seed, std::size_t count) {
    Prompt tokens(count * 4);
    std::iota(tokens.begin(), tokens.end(), seed * 100'000);
    return tokens;
}

Prompt operator+(Prompt a, const Prompt& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

PayloadList numbers(std::uint64_t first, std::size_t count) {
    PayloadList list(count);
    std::iota(list.begin(), list.end(), first);
    return list;
}

struct Fixture {
    RadixTree tree;
    explicit Fixture(RadixConfig config = {.block_tokens = 4}) : tree(config) {}

    Inserted put(const Prompt& tokens, std::uint64_t first, std::uint32_t ns = 0, Storing how = {}) {
        const PayloadList payloads = numbers(first, tokens.size() / 4);
        Inserted result = tree.insert(tokens, payloads, ns, how);
        sound();
        return result;
    }
    PayloadList get(const Prompt& tokens, std::uint32_t ns = 0, Lookup how = {}) {
        Match found = tree.match(tokens, ns, how);
        CHECK(found.num_tokens == found.blocks.size() * 4);
        sound();
        return found.blocks;
    }
    MissReason why(const Prompt& tokens, std::uint32_t ns = 0, Lookup how = {}) { return tree.match(tokens, ns, how).miss_reason; }
    void sound() {
        const std::string fault = tree.check();
        if (!fault.empty()) std::fprintf(stderr, "%s\n", fault.c_str());
        CHECK(fault.empty());
    }
};

void finds_what_was_inserted_and_only_that() {
    Fixture f;
    const Prompt head = prompt(1, 10), a = head + prompt(2, 5), b = head + prompt(3, 7);
    CHECK(f.put(a, 100).num_new == 15);
    CHECK(f.get(a) == numbers(100, 15));
    CHECK(f.get(b) == numbers(100, 10));
    const Inserted second = f.put(b, 200);
    CHECK(second.num_new == 7 && second.num_tokens == b.size());
    CHECK(second.duplicates == numbers(200, 10) && second.surplus == numbers(200, 10));
    CHECK(f.get(a) == numbers(100, 15));
    PayloadList expected = numbers(100, 10);
    for (const std::uint64_t payload : numbers(210, 7)) expected.push_back(payload);
    CHECK(f.get(b) == expected);
    CHECK(f.tree.num_blocks() == 22 && f.tree.stats().num_nodes == 3);
    CHECK(f.tree.insert(a, numbers(100, 15), 0).surplus.empty());  // its own blocks again
    CHECK(f.get(prompt(1, 1)).size() == 1 && f.get(prompt(4, 1)).empty());
}

void compares_tokens_in_every_block() {
    Fixture f;
    const Prompt whole = prompt(1, 40);
    f.put(whole, 0);
    for (std::size_t i = 0; i < whole.size(); ++i) {
        Prompt other = whole;
        other[i] ^= 1;
        CHECK(f.get(other).size() == i / 4);
    }
    for (std::size_t length = 0; length <= whole.size(); ++length) {
        CHECK(f.get(Prompt(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length))).size() == length / 4);
    }
}

void refuses_what_makes_no_sense() {
    CHECK_THROWS(RadixTree({.block_tokens = 12}), Code::kConfig);
    CHECK_THROWS(RadixTree({.block_tokens = 0}), Code::kConfig);
    CHECK_THROWS(RadixTree({.max_bytes = 1000}), Code::kConfig);
    CHECK_THROWS(RadixTree({.ttl_ns = -1}), Code::kConfig);
    Fixture f;
    const Prompt tokens = prompt(1, 3);
    CHECK_THROWS(f.tree.insert(tokens, numbers(0, 2), 0), Code::kConfig);
    CHECK_THROWS(f.tree.insert(tokens, numbers(0, 3), 0, {.priority = 8}), Code::kConfig);
    Prompt negative = tokens;
    negative.back() = -1;
    CHECK_THROWS(f.tree.insert(negative, numbers(0, 3), 0), Code::kConfig);
    CHECK_THROWS(f.tree.match(negative, 0), Code::kConfig);
    CHECK(f.tree.num_blocks() == 0 && f.tree.stats().num_namespaces == 0);
    CHECK(f.put({}, 0).num_tokens == 0 && f.put({1, 2, 3}, 0).num_new == 0);
    CHECK(f.why({1, 2, 3}) == MissReason::kNone);
}

void evicts_the_least_recently_used_leaf_block_by_block() {
    Fixture f;
    const Prompt head = prompt(1, 4), a = head + prompt(2, 3), b = head + prompt(3, 3);
    f.put(a, 10);
    f.put(b, 20);
    f.put(prompt(9, 2), 30);
    CHECK(f.get(a).size() == 7);  // order of use is now b, prompt 9, a
    CHECK(f.tree.coldest(3) == (PayloadList{26, 25, 24}));
    CHECK(f.tree.evict(2) == (PayloadList{26, 25}));
    CHECK(f.get(b, 0, {.touch = false}).size() == 5);
    CHECK(f.tree.evict(2) == (PayloadList{24, 31}));
    CHECK(f.tree.evict(100) == (PayloadList{30, 16, 15, 14, 13, 12, 11, 10}));
    CHECK(f.tree.num_blocks() == 0 && f.tree.stats().num_nodes == 0 && f.tree.stats().num_namespaces == 0);
    f.sound();
}

void evicts_low_priorities_first() {
    Fixture f;
    const Prompt head = prompt(1, 2), urgent = head + prompt(2, 2), plain = head + prompt(3, 2);
    f.put(urgent, 10, 0, {.priority = 5});
    f.put(plain, 20);
    CHECK(f.tree.evict(3) == (PayloadList{23, 22, 13}));
    CHECK(f.get(plain).size() == 2);  // the shared head has the higher priority
}

struct Keep final : Evictable {
    std::set<std::uint64_t> kept;
    bool evictable(std::uint64_t payload) const noexcept override { return !kept.contains(payload); }
};

void passes_over_what_the_filter_keeps() {
    Fixture f;
    f.put(prompt(1, 4), 10);
    f.put(prompt(2, 4), 20);
    Keep keep;
    keep.kept = {12, 23};
    CHECK(f.tree.evict(8, &keep) == (PayloadList{13}));
    CHECK(f.tree.coldest(8, &keep) == (PayloadList{11, 10, 22, 21, 20}));
    CHECK(f.tree.remove(prompt(2, 4), 0, &keep).empty());
    keep.kept = {21};
    CHECK(f.tree.remove(prompt(2, 4), 0, &keep) == (PayloadList{23, 22}));
    f.sound();
}

void pins_hold_the_matched_path_only() {
    Fixture f;
    f.put(prompt(1, 8), 10);
    const Match held = f.tree.match(prompt(1, 3), 0, {.pin = true});
    f.sound();
    CHECK(f.tree.stats().pinned_blocks == 3);
    CHECK(f.tree.evict(100) == (PayloadList{17, 16, 15, 14, 13}));
    CHECK(f.tree.remove(prompt(1, 8), 0).empty() && f.tree.clear_all().empty());
    f.put(prompt(1, 3) + prompt(2, 2), 50);  // grows below a pinned run, without pinning what is new
    CHECK(f.tree.stats().pinned_blocks == 3);
    f.put(prompt(1, 2) + prompt(3, 1), 60);  // splits a pinned run
    CHECK(f.tree.stats().pinned_blocks == 3);
    CHECK(f.tree.evict(100).size() == 3 && f.tree.num_blocks() == 3);
    f.tree.unpin(held.pinned);
    f.sound();
    CHECK(f.tree.evict(100).size() == 3);
}

void deletes_only_what_one_prompt_needs() {
    Fixture f;
    const Prompt head = prompt(1, 4), a = head + prompt(2, 3), b = head + prompt(3, 3);
    f.put(a, 10);
    f.put(b, 20);
    CHECK(f.tree.remove(head, 0).empty());
    CHECK(f.tree.remove(b, 0) == (PayloadList{26, 25, 24}));
    CHECK(f.why(b) == MissReason::kDeleted);
    CHECK(f.tree.remove(a, 0) == (PayloadList{16, 15, 14, 13, 12, 11, 10}));
    CHECK(f.tree.remove(a, 0).empty());
    f.sound();
}

void forgets_after_the_time_to_live() {
    Fixture f({.block_tokens = 4, .ttl_ns = 100});
    f.put(prompt(1, 2), 10, 0, {.now_ns = 0});
    f.put(prompt(2, 2), 20, 0, {.now_ns = 50});
    CHECK(f.get(prompt(1, 2), 0, {.now_ns = 99, .touch = false}).size() == 2);
    CHECK(f.get(prompt(1, 2), 0, {.now_ns = 100}).empty());
    CHECK(f.why(prompt(1, 2), 0, {.now_ns = 100}) == MissReason::kExpired);
    CHECK(f.get(prompt(2, 2), 0, {.now_ns = 149}).size() == 2);  // a use renews it
    CHECK(f.tree.expire(150) == (PayloadList{11, 10}));
    CHECK(f.get(prompt(2, 2), 0, {.now_ns = 200}).size() == 2);
    CHECK(f.put(prompt(3, 1), 30, 0, {.now_ns = 400}).evicted == (PayloadList{21, 20}));
    const Match held = f.tree.match(prompt(3, 1), 0, {.now_ns = 400, .pin = true});
    CHECK(f.tree.expire(1000).empty());
    CHECK(f.put(prompt(3, 1), 40, 0, {.now_ns = 1000}).duplicates.size() == 1);  // pinned: renewed in place
    f.tree.unpin(held.pinned);
}

void says_why_a_lookup_stopped() {
    Fixture f;
    const Prompt a = prompt(1, 6);
    CHECK(f.why(a) == MissReason::kNeverStored);
    f.put(a, 10, 7);
    CHECK(f.why(a, 7) == MissReason::kNone);
    CHECK(f.why(a, 8) == MissReason::kOtherIdentity);
    CHECK(f.why(a + prompt(2, 1), 7) == MissReason::kNeverStored);
    f.tree.evict(2);
    CHECK(f.why(a, 7) == MissReason::kEvicted && f.why(a + prompt(2, 1), 7) == MissReason::kEvicted);
    f.tree.mark(a, 7, MissReason::kInFlight);
    CHECK(f.why(a, 7) == MissReason::kInFlight);
    f.put(a, 20, 7);
    f.tree.clear(7, MissReason::kInstanceGone);
    CHECK(f.why(a, 7) == MissReason::kInstanceGone && f.why(a, 8) == MissReason::kNeverStored);
    const RadixStats stats = f.tree.stats();
    CHECK(stats.gone[static_cast<int>(MissReason::kEvicted)] == 2);
    CHECK(stats.gone[static_cast<int>(MissReason::kInstanceGone)] == 6);
    CHECK(std::accumulate(std::begin(stats.misses), std::end(stats.misses), std::uint64_t{0}) == stats.lookups);
}

void keeps_to_its_caps() {
    const std::size_t cap = 256 << 10;
    Fixture f({.block_tokens = 4, .max_bytes = cap});
    std::mt19937 random(7);
    std::set<std::uint64_t> held;
    for (std::uint64_t i = 0; i < 400; ++i) {
        const std::size_t count = random() % 300 + 1;
        const Prompt tokens = prompt(static_cast<std::int32_t>(random() % 40), 1 + random() % 50) + prompt(static_cast<std::int32_t>(i), count);
        const PayloadList payloads = numbers(i * 1000, tokens.size() / 4);
        const Inserted result = f.tree.insert(tokens, payloads, 0);
        const std::size_t whole = result.num_tokens / 4;
        CHECK(f.tree.stats().nbytes <= cap);
        CHECK(f.get(tokens).size() == whole);
        held.insert(payloads.begin() + static_cast<std::ptrdiff_t>(whole - result.num_new), payloads.begin() + static_cast<std::ptrdiff_t>(whole));
        for (const std::uint64_t payload : result.evicted) CHECK(held.erase(payload) == 1);
        CHECK(held.size() == f.tree.num_blocks());
    }
    const Inserted huge = f.put(prompt(99, 100'000), 1);
    CHECK(huge.num_new > 1000 && huge.num_new < 100'000 && f.tree.stats().refused_blocks > 0);
    const Match held_path = f.tree.match(prompt(99, 100'000), 0, {.pin = true});
    CHECK(f.put(prompt(98, 2000), 1).num_new < 2000);
    f.tree.unpin(held_path.pinned);
    CHECK(f.put(prompt(98, 2000), 1).num_tokens == 8000);
}

void one_tenant_does_not_push_another_out() {
    Fixture f({.block_tokens = 4, .max_tenant_bytes = 64 << 10});
    CHECK(f.tree.set_tenant(1, 5) && f.tree.set_tenant(2, 5));
    f.put(prompt(1, 100), 0, 3);
    f.put(prompt(2, 100), 0, 1);
    CHECK(!f.tree.set_tenant(1, 6) && f.tree.set_tenant(1, 5));
    std::size_t evicted = 0;
    for (std::int32_t i = 10; i < 200; ++i) evicted += f.put(prompt(i, 50), 0, i % 2 == 0 ? 1u : 2u).evicted.size();
    CHECK(evicted > 5000 && f.tree.tenant_bytes(1) == f.tree.tenant_bytes(2));
    CHECK(f.tree.tenant_bytes(1) <= 64 << 10 && f.tree.tenant_bytes(1) > 50 << 10);
    CHECK(f.get(prompt(1, 100), 3).size() == 100);
    CHECK(f.put(prompt(500, 10'000), 0, 2).num_new < 10'000);  // its own blocks all went first
    CHECK(f.get(prompt(1, 100), 3).size() == 100);
}

void forgets_the_accounts_of_namespaces_that_hold_nothing() {
    Fixture f({.block_tokens = 4, .max_tenant_bytes = 64 << 10});
    CHECK(f.tree.set_tenant(1, 5) && f.tree.set_tenant(2, 5) && f.tree.set_tenant(3, 6));
    f.put(prompt(1, 4), 0, 1);
    const std::vector<std::uint32_t> all{1, 2, 3, 9};
    CHECK((f.tree.forget(all) == std::vector<std::uint32_t>{2, 3, 9}));
    CHECK(f.tree.tenant_bytes(1) > 0 && f.tree.tenant_bytes(2) == 0);  // 2 is a tenant of its own again
    CHECK(!f.tree.set_tenant(1, 6) && f.tree.set_tenant(2, 6));
    f.tree.clear(1);
    CHECK(f.tree.forget(std::vector<std::uint32_t>{1}).size() == 1 && f.tree.stats().num_namespaces == 0);
}

void joins_short_runs_that_are_used_together() {
    Fixture f;
    const Prompt head = prompt(1, 4), a = head + prompt(2, 4), b = head + prompt(3, 4);
    f.put(a, 10);
    f.put(b, 20);
    CHECK(f.tree.stats().num_nodes == 3);
    f.tree.remove(b, 0);
    f.put(a, 10);
    CHECK(f.tree.stats().num_nodes == 1 && f.get(a) == numbers(10, 8));
    for (std::size_t blocks = 9; blocks < 200; ++blocks) f.put(prompt(1, blocks), 10);
    CHECK(f.tree.stats().num_nodes < 12 && f.get(prompt(1, 199)).size() == 199);
}

}  // namespace

int main() {
    finds_what_was_inserted_and_only_that();
    compares_tokens_in_every_block();
    refuses_what_makes_no_sense();
    evicts_the_least_recently_used_leaf_block_by_block();
    evicts_low_priorities_first();
    passes_over_what_the_filter_keeps();
    pins_hold_the_matched_path_only();
    deletes_only_what_one_prompt_needs();
    forgets_after_the_time_to_live();
    says_why_a_lookup_stopped();
    keeps_to_its_caps();
    one_tenant_does_not_push_another_out();
    forgets_the_accounts_of_namespaces_that_hold_nothing();
    joins_short_runs_that_are_used_together();
    return 0;
}
