// The slot protocol between threads, for the sanitizers: no race on slots, seats or mailboxes, every wait ends on abort.
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/decode/attention_worker.hpp"
#include "core/decode/ffn_worker.hpp"
#include "core/error.hpp"

using namespace poolweave::decode;

namespace {

constexpr std::int64_t kHidden = 16, kVocab = 31, kHeads = 2, kDim = 8, kLayers = 2, kBlock = 4, kSlots = 24, kEnd = 40;

struct Model {
    std::vector<std::vector<float>> kept;
    std::vector<float> memory;
    AttentionStack attention;
    FfnStack ffn;
    KvView kv;

    Matrix draw(std::mt19937& random, std::int64_t rows, std::int64_t cols) {
        std::normal_distribution<float> normal(0.0F, 0.4F);
        kept.emplace_back(rows * cols);
        for (float& value : kept.back()) value = normal(random);
        return {kept.back().data(), rows, cols, cols, Dtype::kF32};
    }

    Ends ends(std::mt19937& random) {
        const Matrix embedding = draw(random, kVocab, kHidden);
        return {embedding, {ones(), 1e-6F}, draw(random, kVocab, kHidden)};
    }

    const float* ones() {
        kept.emplace_back(kHidden, 1.0F);
        return kept.back().data();
    }

    explicit Model(unsigned seed, std::mt19937 random = std::mt19937())
        : memory(kSlots * kLayers * 2 * kBlock * kHeads * kDim),
          attention(portable_kernels(), (random.seed(seed), ends(random)), Rope({1.0F, 0.5F, 0.1F, 0.01F}, 1.0F, RopeForm::kHalves)),
          ffn(portable_kernels(), kHidden) {
        const std::int64_t plane = kBlock * kHeads * kDim, layer = 2 * plane;
        kv = {reinterpret_cast<std::byte*>(memory.data()), kSlots, kLayers, 2, kBlock, kHeads, kDim, kLayers * layer, layer, plane, Dtype::kF32};
        for (int n = 0; n < kLayers; ++n) {
            const std::int64_t inner = kHeads * kDim;
            attention.add({{ones(), 1e-6F}, {ones(), 1e-6F},
                           GroupedWeights{.heads = kHeads, .kv_heads = kHeads, .head_dim = kDim, .q = {draw(random, inner, kHidden)},
                                          .k = {draw(random, inner, kHidden)}, .v = {draw(random, inner, kHidden)},
                                          .o = {draw(random, kHidden, inner)}, .q_norm = {}, .k_norm = {}, .scale = 0.35F}});
            ffn.add({.dense = {{draw(random, 24, kHidden)}, {draw(random, 24, kHidden)}, {draw(random, kHidden, 24)}}, .moe = {}});
        }
    }
};

void seat_request(const Board& board, std::int32_t index, std::int32_t first, std::int32_t first_block) {
    Seat& seat = board.seat(index);
    board.tokens(index)[0] = first;
    for (std::int32_t i = 0; i < kEnd / kBlock; ++i) board.table(index)[i] = first_block + i;
    seat.given = 1, seat.end = kEnd, seat.num_stops = 0, seat.temperature = 0.0F, seat.top_p = 1.0F, seat.seed = 0;
    seat.finish.store(Finish::kRunning);
    seat.position.store(0);
}

void form(const Board& board, std::int32_t index, std::int32_t model, std::int32_t seat) {
    Slot& slot = board.slot(index);
    slot.model = model, slot.layer = 0, slot.rows = 1, slot.seats[0] = seat;
    slot.called.store(0);
    slot.ticket = board.next_ticket();
    slot.turn.store(Turn::kReady, std::memory_order_release);
    board.header().attention[0].ring();
}

// Four requests of two models, two FFN ranks, two in flight, each request twice over: the same tokens both times.
void test_batches_cross_between_threads() {
    Model models[2] = {Model(1), Model(2)};
    const Board board = Board::create({4, 1, 4, kEnd, kBlock, kHidden, 2});
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
                board.header().host.rest(seen, 1000, {});
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

void test_a_bell_wakes_a_sleeper() {
    const Board board = Board::create({1, 1, 1, 8, kBlock, kHidden, 1});
    Bell& bell = board.header().host;
    for (int i = 0; i < 200; ++i) {
        const std::uint32_t seen = bell.rung.load();
        std::thread ringer([&] { bell.ring(); });
        bell.rest(seen, 60'000, std::chrono::microseconds(50));  // a lost wake-up would sit here for a minute, and the test's time limit would end it
        CHECK(bell.rung.load() == seen + 1);
        ringer.join();
    }
    bell.rest(bell.rung.load(), 1, {});  // nobody rings: it returns all the same
}

}  // namespace

int main() {
    test_batches_cross_between_threads();
    test_a_bell_wakes_a_sleeper();
    return 0;
}
