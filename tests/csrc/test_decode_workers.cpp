// The slot protocol between threads, for the sanitizers: no race on slots, seats or mailboxes, every wait ends on abort. Under
// every table of kernels that runs here and both types of weights and KV, for each reads and writes what threads hand over.
#include <pthread.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/decode/attention_worker.hpp"
#include "core/decode/ffn_worker.hpp"
#include "core/error.hpp"

using namespace poolweave::decode;

namespace {

// Two heads share KV. The widest vectors take most of a head at a time, and leave columns to the loops after them.
constexpr std::int64_t kHidden = 40, kVocab = 31, kHeads = 4, kKvHeads = 2, kDim = 42, kInner = 24;
constexpr std::int64_t kLayers = 2, kBlock = 4, kSlots = 24, kEnd = 40;

std::vector<float> frequencies() {
    std::vector<float> all(kDim / 2, 1.0F);
    for (std::size_t i = 1; i < all.size(); ++i) all[i] = all[i - 1] * 0.7F;
    return all;
}

// All of a model, or what one of `width` ranks has of it.
struct Model {
    const Kernels& kernels;
    Dtype dtype;
    std::mt19937 random;
    std::int64_t share, width;
    std::vector<std::vector<float>> kept;
    std::vector<std::byte> memory;
    PackedStore store;
    AttentionStack attention;
    FfnStack ffn;
    KvView kv;

    Model(const Kernels& table, Dtype type, unsigned seed, std::int64_t number = 0, std::int64_t of = 1)
        : kernels(table), dtype(type), random(seed), share(number), width(of),
          attention(table, kHidden, ends(), Rope(frequencies(), 1.0F, RopeForm::kHalves)), ffn(table, kHidden) {
        const std::int64_t heads = kHeads / width, kv_heads = kKvHeads / width, plane = kBlock * kv_heads * kDim, layer = 2 * plane;
        memory.resize(kSlots * kLayers * layer * dtype_bytes(dtype));
        kv = {memory.data(), kSlots, kLayers, 2, kBlock, kv_heads, kDim, kLayers * layer, layer, plane, dtype};
        for (int n = 0; n < kLayers; ++n) {
            attention.add({{ones(), 1e-6F}, {ones(), 1e-6F},
                           GroupedWeights{.heads = heads, .kv_heads = kv_heads, .head_dim = kDim, .q = {rows_of(kHeads)},
                                          .k = {rows_of(kKvHeads)}, .v = {rows_of(kKvHeads)}, .o = {columns_of(kHeads)},
                                          .q_norm = {}, .k_norm = {}, .scale = 0.15F}});
            ffn.add({.dense = {{draw(kInner, kHidden)}, {draw(kInner, kHidden)}, {draw(kHidden, kInner)}}, .moe = {}});
        }
    }

    Matrix numbers(std::int64_t rows, std::int64_t cols) {
        std::normal_distribution<float> normal(0.0F, 0.4F);
        kept.emplace_back(rows * cols);
        for (float& value : kept.back()) value = normal(random);
        if (dtype == Dtype::kBf16) {
            auto* cut = reinterpret_cast<unsigned char*>(kept.back().data());  // the upper half of each float, side by side
            for (std::size_t i = 0; i < kept.back().size(); ++i) {
                const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(kept.back()[i]) >> 16);
                std::memcpy(cut + 2 * i, &half, sizeof half);
            }
        }
        return {kept.back().data(), rows, cols, cols, dtype};
    }
    Packed draw(std::int64_t rows, std::int64_t cols) { return store.pack(numbers(rows, cols)); }

    // Rows of a whole matrix that belong to this share of the heads; or columns.
    Packed rows_of(std::int64_t heads) {
        const std::int64_t rows = heads / width * kDim;
        return store.pack(numbers(heads * kDim, kHidden).slice(share * rows, rows));
    }
    Packed columns_of(std::int64_t heads) {
        const std::int64_t cols = heads / width * kDim;
        Matrix all = numbers(kHidden, heads * kDim);
        all.data = static_cast<const std::byte*>(all.data) + share * cols * dtype_bytes(dtype);
        all.cols = cols;
        return store.pack(all);
    }

    Ends ends() {
        const Packed embedding = draw(kVocab, kHidden), head = draw(kVocab, kHidden);
        return share > 0 ? Ends{} : Ends{embedding, {ones(), 1e-6F}, head};
    }

    const float* ones() {
        kept.emplace_back(kHidden, 1.0F);
        return kept.back().data();
    }
};

void seat_request(const Board& board, std::int32_t index, std::int32_t first, std::int32_t first_block) {
    Seat& seat = board.seat(index);
    board.tokens(index)[0] = first;
    for (std::uint32_t share = 0; share < board.shape().width; ++share)  // each rank has its own blocks
        for (std::int32_t i = 0; i < kEnd / kBlock; ++i) board.table(index, static_cast<int>(share))[i] = (first_block + i + static_cast<int>(share)) % kSlots;
    seat.given = 1, seat.end = kEnd, seat.num_stops = 0, seat.temperature = 0.0F, seat.top_p = 1.0F, seat.seed = 0;
    seat.finish.store(Finish::kRunning);
    seat.position.store(0);
}

void form(const Board& board, std::int32_t index, std::int32_t model, std::int32_t seat, Ranks group = 1) {
    Slot& slot = board.slot(index);
    slot.model = model, slot.layer = 0, slot.rows = 1, slot.seats[0] = seat, slot.group = group;
    slot.arrived.store(group & ~1U);  // rank 0 leads
    slot.called.store(0);
    slot.ticket = board.next_ticket();
    slot.turn.store(Turn::kReady, std::memory_order_release);
    board.header().attention[0].ring();
}

// Four requests of two models, two FFN ranks, two in flight, each request twice over: the same tokens both times.
void test_batches_cross_between_threads(const Kernels& kernels, Dtype dtype) {
    Model models[2] = {Model(kernels, dtype, 1), Model(kernels, dtype, 2)};
    const Board board = Board::create({4, 1, 4, kEnd, kBlock, kHidden, 2, 0, 1});
    AttentionWorker attention(board, 0);
    FfnWorker ranks[2] = {FfnWorker(board, 0), FfnWorker(board, 1)};
    for (int m = 0; m < 2; ++m) {
        board.model(m).num_layers = kLayers, board.model(m).layer_cost = 1.0F;
        board.model(m).owners[0] = 1, board.model(m).owners[1] = 2;  // a layer a rank
        attention.activate(m, &models[m].attention, models[m].kv);
        for (FfnWorker& rank : ranks) rank.activate(m, &models[m].ffn, {0, 1});
    }
    std::thread threads[3] = {std::thread([&] { attention.run(); }), std::thread([&] { ranks[0].run(); }),
                              std::thread([&] { ranks[1].run(); })};
    std::vector<std::int32_t> first[4];
    for (int round = 0; round < 2; ++round) {
        for (std::int32_t i = 0; i < 4; ++i) {
            seat_request(board, i, 3 + i, (i / 2) * 12);
            form(board, i, i % 2, i);
        }
        for (std::int32_t i = 0; i < 4; ++i) {
            while (board.slot(i).turn.load(std::memory_order_acquire) != Turn::kHost) {
                const std::uint32_t seen = board.header().host.rung.load(std::memory_order_acquire);
                if (board.slot(i).turn.load(std::memory_order_acquire) == Turn::kHost) break;
                board.header().host.sleep(seen, 1000);
            }
            CHECK(board.seat(i).finish.load() == Finish::kLength);
            const std::vector<std::int32_t> tokens(board.tokens(i).begin(), board.tokens(i).end());
            if (round == 0) first[i] = tokens;
            CHECK(tokens == first[i]);
            board.slot(i).turn.store(Turn::kIdle, std::memory_order_release);
        }
    }
    board.abort();
    for (std::thread& thread : threads) thread.join();
    CHECK(attention.stages() == 2 * 4 * (kEnd - 1) * (kLayers + 1));
    CHECK(ranks[0].stages() == 2 * 4 * (kEnd - 1));
}

// Two requests at once over heads on one rank and on two: the same tokens.
void test_a_group_shares_the_heads(const Kernels& kernels, Dtype dtype) {
    std::vector<std::int32_t> expected[2];
    for (const std::int64_t width : {1, 2}) {
        const Board board = Board::create({2, 1, 2, kEnd, kBlock, kHidden, 1, 0, static_cast<std::uint32_t>(width)});
        Model shares[2] = {Model(kernels, dtype, 3, 0, width), Model(kernels, dtype, 3, width - 1, width)};
        AttentionWorker attention[2] = {AttentionWorker(board, 0), AttentionWorker(board, 1)};
        FfnWorker ffn(board, 0);
        board.model(0).num_layers = kLayers, board.model(0).layer_cost = 1.0F;
        board.model(0).owners[0] = board.model(0).owners[1] = 1;
        for (int rank = 0; rank < width; ++rank) attention[rank].activate(0, &shares[rank].attention, shares[rank].kv);
        ffn.activate(0, &shares[0].ffn, {0, 1});
        std::thread threads[3] = {std::thread([&] { attention[0].run(); }), std::thread([&] { attention[1].run(); }),
                                  std::thread([&] { ffn.run(); })};
        for (std::int32_t i = 0; i < 2; ++i) {
            seat_request(board, i, 3 + i, i * 12);
            form(board, i, 0, i, width == 1 ? 1 : 3);
        }
        for (std::int32_t i = 0; i < 2; ++i) {
            while (board.slot(i).turn.load(std::memory_order_acquire) != Turn::kHost) {
                const std::uint32_t seen = board.header().host.rung.load(std::memory_order_acquire);
                if (board.slot(i).turn.load(std::memory_order_acquire) == Turn::kHost) break;
                board.header().host.sleep(seen, 1000);
            }
            const std::vector<std::int32_t> tokens(board.tokens(i).begin(), board.tokens(i).end());
            if (width == 1) expected[i] = tokens;
            CHECK(tokens == expected[i]);
        }
        board.abort();
        for (std::thread& thread : threads) thread.join();
        CHECK(attention[1].stages() == (width == 1 ? 0U : 2 * (kEnd - 1) * kLayers));
    }
}

void test_a_bell_wakes_a_sleeper() {
    const Board board = Board::create({1, 1, 1, 8, kBlock, kHidden, 1, 0, 1});
    Bell& bell = board.header().host;
    Waiter waiter;
    for (int i = 0; i < 200; ++i) {
        const std::uint32_t seen = bell.rung.load();
        std::thread ringer([&] { bell.ring(); });
        waiter.rest(bell, seen, 60'000, std::chrono::microseconds(50));  // a lost wake-up would sit here for a minute, and the test's time limit would end it
        CHECK(bell.rung.load() == seen + 1);
        ringer.join();
    }
    waiter.rest(bell, bell.rung.load(), 1, {});  // nobody rings: it returns all the same
}

// One that spins gives its core up for a sleep as soon as it finds that it shares it.
void test_a_waiter_sleeps_where_another_takes_its_core() {
    const Board board = Board::create({1, 1, 1, 8, kBlock, kHidden, 1, 0, 1});
    Bell& bell = board.header().host;
    cpu_set_t cores;
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof cores, &cores) == 0);
    int core = 0;
    while (!CPU_ISSET(core, &cores)) ++core;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    std::atomic<bool> over{false};
    std::thread waiting([&] {
        pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
        Waiter().rest(bell, bell.rung.load(), 600'000, std::chrono::minutes(10));
        over = true;
    });
    std::thread taking([&] {
        pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
        while (!over) {}
    });
    while (bell.sleepers.load() == 0) std::this_thread::yield();
    CHECK(!over);
    bell.ring();
    waiting.join();
    taking.join();
}

}  // namespace

int main() {
    for (const Kernels* kernels : kernel_tables()) {
        for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
            test_batches_cross_between_threads(*kernels, dtype);
            test_a_group_shares_the_heads(*kernels, dtype);
        }
    }
    test_a_bell_wakes_a_sleeper();
    test_a_waiter_sleeps_where_another_takes_its_core();
    return 0;
}
