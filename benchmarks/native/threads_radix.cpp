// How much more do two threads match than one, in C++ alone? Driven by benchmarks/bench_radix_threads.py.
//
//     threads_radix CONVERSATIONS SECONDS ROUNDS
//
// The prompts of benchmarks/workload.py: 8 system prompts, CONVERSATIONS conversations of 20 variants each, 4,096 tokens a
// prompt. Each thread has a CPU of its own. One thread and two take turns, SECONDS each; medians over ROUNDS.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "core/radix_tree.hpp"

namespace {

using Prompt = std::vector<std::int32_t>;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kBlock = 16, kTokens = 4096, kSystem = 1024, kConversation = 2048, kVariants = 20, kSystems = 8;
constexpr std::size_t kCached = 100;   // prompts that stay in the caches
constexpr std::size_t kUnchecked = 16; // matches between two looks at the clock

std::vector<Prompt> make_prompts(std::size_t conversations) {
    std::mt19937 random(0);
    const auto draw = [&](Prompt& to, std::size_t count) {
        std::generate_n(std::back_inserter(to), count, [&] { return static_cast<std::int32_t>(random() % 128'000); });
    };
    std::vector<Prompt> systems(kSystems), prompts;
    for (Prompt& system : systems) draw(system, kSystem);
    for (std::size_t i = 0; i < conversations; ++i) {
        Prompt conversation = systems[i % kSystems];
        draw(conversation, kConversation);
        for (std::size_t variant = 0; variant < kVariants; ++variant) {
            prompts.push_back(conversation);
            draw(prompts.back(), kTokens - kSystem - kConversation);
        }
    }
    std::shuffle(prompts.begin(), prompts.end(), random);
    return prompts;
}

std::vector<int> allowed_cpus() {
    cpu_set_t set;
    std::vector<int> cpus;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
    return cpus;
}

void pin_to(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0) {
        std::fprintf(stderr, "cannot pin a thread to CPU %d\n", cpu);
        std::exit(1);
    }
}

// Matches a second of a thread on each of `cpus` together. Thread i begins at its own part of the prompts.
double matches_per_s(poolweave::RadixTree& tree, std::span<const Prompt> prompts, std::span<const int> cpus, double seconds) {
    std::barrier start(static_cast<std::ptrdiff_t>(cpus.size()));
    std::vector<double> rates(cpus.size());
    std::vector<std::thread> threads;
    for (std::size_t me = 0; me < cpus.size(); ++me) {
        threads.emplace_back([&, me] {
            pin_to(cpus[me]);
            std::size_t at = me * prompts.size() / cpus.size(), done = 0;
            start.arrive_and_wait();
            const auto begin = Clock::now();
            std::chrono::duration<double> spent{};
            for (; spent.count() < seconds; spent = Clock::now() - begin) {
                for (std::size_t i = 0; i < kUnchecked; ++i, ++done, at = (at + 1) % prompts.size()) {
                    if (tree.match(prompts[at], 0).num_tokens != kTokens) std::abort();
                }
            }
            rates[me] = static_cast<double>(done) / spent.count();
        });
    }
    for (std::thread& thread : threads) thread.join();
    return std::accumulate(rates.begin(), rates.end(), 0.0);
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void report(const char* metric, poolweave::RadixTree& tree, std::span<const Prompt> prompts, double seconds, int rounds) {
    const std::vector<int> cpus = allowed_cpus();
    if (cpus.size() < 2) {
        std::fprintf(stderr, "two CPUs are needed, %zu may be used\n", cpus.size());
        std::exit(1);
    }
    std::vector<double> one, two, ratio;
    for (int round = 0; round < rounds; ++round) {
        one.push_back(matches_per_s(tree, prompts, {cpus.data(), 1}, seconds));
        two.push_back(matches_per_s(tree, prompts, {cpus.data(), 2}, seconds));
        ratio.push_back(two.back() / one.back());
    }
    std::printf("{\"metric\": \"%s\", \"prompts\": %zu, \"one_thread\": %.0f, \"two_threads\": %.0f, \"ratio\": %.3f, "
                "\"least\": %.3f, \"most\": %.3f}\n",
                metric, prompts.size(), median(one), median(two), median(ratio), *std::min_element(ratio.begin(), ratio.end()),
                *std::max_element(ratio.begin(), ratio.end()));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s CONVERSATIONS SECONDS ROUNDS\n", argv[0]);
        return 2;
    }
    const double seconds = std::atof(argv[2]);
    const int rounds = std::atoi(argv[3]);
    const std::vector<Prompt> prompts = make_prompts(static_cast<std::size_t>(std::max(1, std::atoi(argv[1]))));
    poolweave::RadixTree tree({.block_tokens = kBlock});
    std::vector<std::uint64_t> payloads(kTokens / kBlock);
    std::iota(payloads.begin(), payloads.end(), 0);
    for (const Prompt& prompt : prompts) tree.insert(prompt, payloads, 0);
    report("match_all_per_s", tree, prompts, seconds, std::max(1, rounds));
    report("match_cached_per_s", tree, std::span(prompts).first(std::min(kCached, prompts.size())), seconds, std::max(1, rounds));
    return 0;
}
