// Hidden states over TCP, both ends in one process, for the sanitizers: what comes back, and every way a link ends.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "core/decode/hidden_link.hpp"
#include "core/error.hpp"

using namespace poolweave;
using namespace poolweave::decode;

// TSan counts what send() read as read after the call, so that the answer, which only comes after it, seems to race with it.
// That the right numbers were sent is seen in what comes back.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "race:HiddenLink::write\n"; }

namespace {

constexpr std::uint32_t kSlots = 4, kRows = 3, kHidden = 24, kModels = 2, kMagic = 0x6b6c'7770;
constexpr int kRounds = 40;

Board make_board() {
    Board board = Board::create({kSlots, kRows, 4, 8, 4, kHidden, kModels, 0, 1});
    for (std::int64_t m = 0; m < kModels; ++m) board.model(m).num_layers = kMaxLayers;
    return board;
}

// Two ends of one connection over the loopback.
std::pair<int, int> tcp_pair() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* at = reinterpret_cast<sockaddr*>(&address);
    CHECK(bind(listener, at, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, at, &size) == 0);
    CHECK(connect(near, at, size) == 0);
    const int far = accept(listener, nullptr, nullptr);
    CHECK(far >= 0);
    close(listener);
    return {near, far};
}

// Both ends of a link over two boards with their four threads.
struct Linked {
    Board near = make_board(), far = make_board();
    std::pair<int, int> fds = tcp_pair();
    HiddenLink ours, theirs;
    std::vector<std::thread> threads;

    explicit Linked(int rank) : ours(near, fds.first, rank, LinkEnd::kAttention), theirs(far, fds.second, rank, LinkEnd::kFfn) {
        for (HiddenLink* end : {&ours, &theirs}) {
            threads.emplace_back([end] { end->send(); });
            threads.emplace_back([end] { end->receive(); });
        }
    }
    void join() {
        for (std::thread& thread : threads) thread.join();
        threads.clear();
    }
};

float number(std::int64_t slot, int round, std::int64_t i) { return static_cast<float>(slot * 1000 + round * 100 + i % 97); }

std::int64_t numbers(const Board& board, std::int64_t slot) { return board.slot(slot).rows * static_cast<std::int64_t>(kHidden); }

// The FFN on the weights side: twice what came, onto what other ranks added before.
void serve(const Board& board, int rank, const std::atomic<bool>& over) {
    while (!over) {
        bool idle = true;
        for (std::int64_t s = 0; s < kSlots; ++s) {
            Slot& slot = board.slot(s);
            if (slot.turn.load(std::memory_order_acquire) != turn_of_rank(rank)) continue;
            const bool onto = next_rank(board.model(slot.model).owners[slot.layer], -1) < rank;
            for (std::int64_t i = 0; i < numbers(board, s); ++i)
                board.delta(s)[i] = 2.0F * board.normed(s)[i] + (onto ? board.delta(s)[i] : 0.0F);
            board.pass_on(s, rank);
            idle = false;
        }
        if (idle) std::this_thread::yield();
    }
}

void form(const Board& board, std::int64_t s, int round, std::int32_t layer) {
    Slot& slot = board.slot(s);
    slot.model = static_cast<std::int32_t>(s % kModels), slot.layer = layer, slot.rows = 1 + static_cast<std::int32_t>((s + round) % kRows);
    slot.group = 1, slot.attention = 0, slot.ticket = board.next_ticket();
    for (std::int64_t i = 0; i < numbers(board, s); ++i) board.normed(s)[i] = number(s, round, i), board.delta(s)[i] = 0.5F;
}

bool came_back(const Board& board, std::int64_t s, int round, float onto) {
    for (std::int64_t i = 0; i < numbers(board, s); ++i)
        if (board.delta(s)[i] != 2.0F * number(s, round, i) + onto) return false;
    return true;
}

// All slots in flight at once, again and again, up to the last layer that a board knows; alone, and onto what rank 0 added.
void test_slots_go_there_and_come_back(int rank) {
    Linked link(rank);
    const float onto = rank > 0 ? 0.5F : 0.0F;
    for (std::int64_t m = 0; m < kModels; ++m) std::fill_n(link.near.model(m).owners, kMaxLayers, static_cast<Ranks>(rank > 0 ? 3 : 1));
    std::atomic<bool> over{false};
    std::thread worker([&] { serve(link.far, rank, over); });
    for (int round = 0; round < kRounds; ++round) {
        const std::int32_t layer = static_cast<std::int32_t>(kMaxLayers) - kRounds + round;
        for (std::int64_t s = 0; s < kSlots; ++s) {
            form(link.near, s, round, layer);
            link.near.slot(s).turn.store(turn_of_rank(rank), std::memory_order_release);
            link.near.header().ffn[rank].ring();
        }
        for (std::int64_t s = 0; s < kSlots; ++s) {
            while (link.near.slot(s).turn.load(std::memory_order_acquire) != Turn::kAttention) std::this_thread::yield();
            CHECK(link.near.slot(s).layer == layer + 1);
            CHECK(came_back(link.near, s, round, onto));
        }
    }
    for (int round = 0; round < kRounds; ++round) {  // by the host's hand, which sets the turns
        const std::int64_t s = round % kSlots;
        link.near.slot(s).turn.store(Turn::kHost);
        form(link.near, s, round, round);
        link.ours.step(s);
        CHECK(came_back(link.near, s, round, onto));
    }
    over = true;
    worker.join();
    link.ours.shut();
    link.join();
}

// Any thread of any end that ends, ends all four; and a step that waits.
void test_every_end_is_noticed() {
    const std::function<void(Linked&)> ends[] = {
        [](Linked& link) { link.near.abort(); }, [](Linked& link) { link.far.abort(); },  [](Linked& link) { link.ours.shut(); },
        [](Linked& link) { link.theirs.shut(); }, [](Linked& link) { shutdown(link.fds.second, SHUT_RDWR); },
    };
    for (const auto& end : ends) {
        Linked link(0);
        form(link.near, 0, 0, 0);
        std::thread step([&] { CHECK_THROWS(link.ours.step(0), Code::kOs); });  // nobody serves at the far end
        while (link.far.slot(0).turn.load() != turn_of_rank(0)) std::this_thread::yield();
        end(link);
        step.join();
        link.join();
        CHECK_THROWS(link.ours.step(1), Code::kOs);
        link.ours.shut();  // once more does no harm
    }
}

using Frame = std::array<std::uint32_t, 8>;  // magic, slot, model, layer, rows, hidden, attention, onto
constexpr Frame kGood = {kMagic, 2, 1, 7, 2, kHidden, 0, 0};

// One end against bytes written by hand: `run` gets the socket they are written to.
template <class Run>
void against_bytes(const Board& board, LinkEnd end, Code wanted, Run run) {
    const auto [peer, own] = tcp_pair();
    HiddenLink link(board, own, 0, end);
    std::thread receiver([&] {
        if (wanted == Code::kOs) link.receive();  // the connection just ends
        else CHECK_THROWS(link.receive(), wanted);
    });
    run(peer);
    shutdown(peer, SHUT_WR);
    receiver.join();
    char rest;
    CHECK(recv(peer, &rest, 1, 0) <= 0);  // the link has hung up too
    link.send();                          // and sends no more
    close(peer);
}

void write_all(int fd, const void* data, std::size_t nbytes, std::size_t piece) {
    const auto* from = static_cast<const char*>(data);
    for (std::size_t i = 0; i < nbytes; i += piece) CHECK(send(fd, from + i, std::min(piece, nbytes - i), MSG_NOSIGNAL) > 0);
}

// Frame and numbers as they are on the wire.
std::vector<std::uint32_t> message(const Frame& frame, std::size_t count, std::uint32_t filler) {
    std::vector<std::uint32_t> words(frame.begin(), frame.end());
    words.resize(words.size() + count, filler);
    return words;
}

void test_a_frame_may_come_in_pieces_but_not_in_part() {
    const auto whole = message(kGood, 2 * kHidden, 0x3f80'0000);
    const std::size_t nbytes = whole.size() * 4;
    for (const std::size_t piece : {std::size_t{1}, std::size_t{33}, nbytes}) {
        const Board board = make_board();
        against_bytes(board, LinkEnd::kFfn, Code::kOs, [&](int peer) { write_all(peer, whole.data(), nbytes, piece); });
        CHECK(board.slot(2).turn.load() == turn_of_rank(0) && board.slot(2).layer == 7 && board.slot(2).rows == 2);
        CHECK(board.normed(2)[0] == 1.0F && board.normed(2)[2 * kHidden - 1] == 1.0F && board.normed(2)[2 * kHidden] == 0.0F);
    }
    for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{32}, std::size_t{33}, nbytes - 1}) {
        const Board board = make_board();
        against_bytes(board, LinkEnd::kFfn, Code::kOs, [&](int peer) { write_all(peer, whole.data(), cut, nbytes); });
        CHECK(board.slot(2).turn.load() == Turn::kIdle && board.slot(2).ticket == 0);
    }
}

void test_a_frame_that_cannot_be_is_refused() {
    const std::pair<std::size_t, std::uint32_t> wrong[] = {
        {0, kMagic + 1}, {1, kSlots}, {1, ~0U},         {2, kModels}, {3, kMaxLayers}, {4, 0},
        {4, kRows + 1},  {4, ~0U},    {5, kHidden - 1}, {5, 0},       {6, kMaxRanks},
    };
    for (const auto& [field, value] : wrong) {
        const Board board = make_board();
        Frame frame = kGood;
        frame[field] = value;
        against_bytes(board, LinkEnd::kFfn, Code::kConfig, [&](int peer) { write_all(peer, frame.data(), sizeof frame, sizeof frame); });
        for (std::int64_t s = 0; s < kSlots; ++s) CHECK(board.slot(s).turn.load() == Turn::kIdle);
    }
    const Board board = make_board();
    board.slot(2).turn.store(turn_of_rank(0));  // still worked on
    against_bytes(board, LinkEnd::kFfn, Code::kConfig, [&](int peer) { write_all(peer, kGood.data(), sizeof kGood, sizeof kGood); });
}

// On the KV side: an answer to nothing, from another rank's slot, or to another question than was asked.
void test_only_the_answer_that_is_awaited_is_taken() {
    const auto send_answer = [](Frame frame, Turn turn, Code wanted) {
        const Board board = make_board();
        form(board, 2, 0, 7);
        board.slot(2).rows = 2, board.slot(2).model = 1;
        board.slot(2).turn.store(turn);

        const auto whole = message(frame, wanted == Code::kOs ? 2 * kHidden : 0, 0x4000'0000);
        against_bytes(board, LinkEnd::kAttention, wanted, [&](int peer) { write_all(peer, whole.data(), whole.size() * 4, 64); });
        CHECK(board.slot(2).turn.load() == (wanted == Code::kOs ? Turn::kAttention : turn));
        CHECK(board.delta(2)[0] == (wanted == Code::kOs ? 2.0F : 0.5F));
    };
    constexpr Frame answer = {kMagic, 2, 1, 8, 2, kHidden, 0, 0};  // at the next layer
    send_answer(answer, away_at_rank(0), Code::kOs);
    for (const Turn turn : {Turn::kIdle, Turn::kAttention, Turn::kHost, turn_of_rank(0), away_at_rank(1)})
        send_answer(answer, turn, Code::kConfig);
    for (const auto& [field, value] : {std::pair<std::size_t, std::uint32_t>{3, 7}, {3, 9}, {4, 1}, {4, 3}}) {
        Frame other = answer;
        other[field] = value;
        send_answer(other, away_at_rank(0), Code::kConfig);
    }
}

void test_a_rank_that_is_none_is_refused_and_its_socket_closed() {
    const Board board = make_board();
    for (const int rank : {-1, static_cast<int>(kMaxRanks)}) {
        const auto [near, far] = tcp_pair();
        CHECK_THROWS(HiddenLink(board, near, rank, LinkEnd::kAttention), Code::kConfig);
        char byte;
        CHECK(read(far, &byte, 1) == 0);  // the other end is gone
        close(far);
    }
}

}  // namespace

int main() {
    test_a_rank_that_is_none_is_refused_and_its_socket_closed();
    test_slots_go_there_and_come_back(0);
    test_slots_go_there_and_come_back(1);
    test_every_end_is_noticed();
    test_a_frame_may_come_in_pieces_but_not_in_part();
    test_a_frame_that_cannot_be_is_refused();
    test_only_the_answer_that_is_awaited_is_taken();
    return 0;
}
