// The board: shared memory over which attention workers, FFN workers and the host hand batches to each other.
//
// A *seat* is one request: its tokens, its KV blocks, how it is sampled and when it ends. A *slot* is one batch: which
// seats, which model, which layer, whose turn. Only the one whose turn it is touches a slot or its seats; a turn is set
// last (release) and read first (acquire). Hidden states cross in the slot's two mailboxes: `normed` towards the FFN,
// `delta` back. Source: CrossPool control lowering (persistent kernels poll queues, send at the pool boundary, wait).
#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/decode/bell.hpp"

namespace poolweave::decode {

inline constexpr std::uint32_t kMaxRows = 16, kMaxStops = 8, kMaxLayers = 256, kMaxRanks = 8;

enum class Turn : std::uint32_t {
    kIdle,       // no batch here; the host's
    kReady,      // has a token to decode; the attention worker starts it when there is room in flight
    kAttention,  // in flight, towards attention
    kHost,       // a request ended or the host asked: it composes the batch anew
    kFfn,        // in flight, towards FFN rank 0; towards rank r it is kFfn + r, so that one word says whose a slot is
};

// A set of FFN or attention ranks, a bit each. FFN ranks of one layer work on a batch one after the other, the lowest first, so that adding
// up has one order.
using Ranks = std::uint8_t;

// The lowest rank above `after`, -1 for none. Before the first one `after` is -1.
inline int next_rank(Ranks ranks, int after) noexcept {
    const unsigned above = ranks & ~((1U << (after + 1)) - 1);
    return above == 0 ? -1 : std::countr_zero(above);
}

inline Turn turn_of_rank(int rank) noexcept { return static_cast<Turn>(static_cast<std::uint32_t>(Turn::kFfn) + rank); }
// Sent to a rank on another host, and not back yet.
inline Turn away_at_rank(int rank) noexcept { return turn_of_rank(static_cast<int>(kMaxRanks) + rank); }

// Which share of a group's heads a rank has.
inline int share_of(Ranks group, int rank) noexcept { return std::popcount(static_cast<unsigned>(group & ((1U << rank) - 1))); }

enum class Finish : std::uint32_t { kRunning, kStop, kLength, kBroken };

// `width`: over how many attention ranks one model's heads can be spread.
struct BoardShape {
    std::uint32_t slots, max_rows, seats, max_tokens, block_tokens, max_hidden, models, events, width;
};

// One stage that a worker ran; a worker keeps its last `events` of them, if the board has room for any.
struct Event {
    std::int64_t start_ns, end_ns;
    std::int32_t slot, model, layer, rows;
};

struct alignas(64) Seat {
    std::atomic<std::int32_t> position;  // of the next token to compute; tokens up to and with it are known
    std::atomic<Finish> finish;
    std::int32_t given;  // tokens that came with the request; later ones are drawn
    std::int32_t end;    // the request is over when it has this many
    std::int32_t num_stops;
    std::int32_t stops[kMaxStops];
    float temperature, top_p;
    std::uint64_t seed;
};

struct alignas(64) Slot {
    std::atomic<Turn> turn;
    std::atomic<std::uint32_t> called;  // the host wants this slot at the next token boundary
    std::int32_t model, layer, rows;
    std::int32_t attention;  // the attention rank that leads: it embeds, samples and chooses; the lowest of `group`
    Ranks group;             // attention ranks that have its KV, each of some heads
    std::atomic<std::uint32_t> arrived;  // of the group: done with their heads in this turn, or not yet to begin
    std::uint64_t ticket;  // orders batches that wait for the same worker
    std::int32_t seats[kMaxRows];
};

struct alignas(64) ModelEntry {
    std::int32_t num_layers;
    float layer_cost;  // what fairness between models weighs a layer with
    Ranks owners[kMaxLayers];  // FFN ranks of each layer
};

struct BoardHeader {
    std::uint64_t magic;
    BoardShape shape;
    std::atomic<std::uint32_t> abort;
    std::atomic<std::uint32_t> in_flight;  // batches of an attention rank that fly at a time: 1 is no pipeline
    std::atomic<std::uint64_t> tickets;
    std::atomic<std::uint64_t> events[2 * kMaxRanks];  // stages run so far: by attention ranks, then by FFN ranks
    Bell host, attention[kMaxRanks], ffn[kMaxRanks];
};

std::int64_t now_ns() noexcept;  // monotonic

class Board {
  public:
    // A new board in an anonymous memfd. Throws kConfig for a shape that cannot be, kOs.
    static Board create(const BoardShape& shape);
    // The board of another process; `fd` is duplicated. Throws kConfig when it is none.
    static Board attach(int fd);
    Board(const Board&) = delete;
    Board& operator=(const Board&) = delete;
    Board(Board&& other) noexcept;
    ~Board();

    int fd() const noexcept { return fd_; }
    const BoardShape& shape() const noexcept { return header().shape; }
    BoardHeader& header() const noexcept { return *reinterpret_cast<BoardHeader*>(base_); }
    ModelEntry& model(std::int64_t index) const noexcept { return models_[index]; }
    Slot& slot(std::int64_t index) const noexcept { return slots_[index]; }
    Seat& seat(std::int64_t index) const noexcept { return seats_[index]; }
    std::span<std::int32_t> tokens(std::int64_t seat) const noexcept { return {tokens_ + seat * shape().max_tokens, shape().max_tokens}; }
    std::span<std::int64_t> stamps(std::int64_t seat) const noexcept { return {stamps_ + seat * shape().max_tokens, shape().max_tokens}; }
    // A seat's blocks on the rank that has `share` of its heads.
    std::span<std::int32_t> table(std::int64_t seat, int share = 0) const noexcept {
        return {tables_ + (seat * shape().width + share) * table_size(), static_cast<std::size_t>(table_size())};
    }
    // What a share's heads add to the residual. Two a slot, by the layer's parity: a rank may be at the next layer while
    // another has not yet read this one's.
    float* partial(std::int64_t slot, std::int64_t layer, int share) const noexcept {
        return partials_ + ((slot * 2 + layer % 2) * shape().width + share) * mailbox_size();
    }
    float* normed(std::int64_t slot) const noexcept { return normed_ + slot * mailbox_size(); }
    float* delta(std::int64_t slot) const noexcept { return delta_ + slot * mailbox_size(); }
    std::span<Event> events(std::size_t worker) const noexcept { return {events_ + worker * shape().events, shape().events}; }
    std::int64_t table_size() const noexcept { return (shape().max_tokens + shape().block_tokens - 1) / shape().block_tokens; }

    std::uint64_t next_ticket() const noexcept { return header().tickets.fetch_add(1) + 1; }
    bool aborted() const noexcept { return header().abort.load(std::memory_order_acquire) != 0; }
    // Keep what worker (attention rank, or kMaxRanks + FFN rank) did in a slot from `start_ns` until now.
    void record(std::size_t worker, std::int64_t slot, std::int64_t start_ns) const noexcept;
    // Rank `rank` of a slot's group is done with its heads. True for the last one, who still has the slot; the others no more.
    bool arrive(std::int64_t slot, int rank) const noexcept;
    // Let the rest of the group begin, whom the leader was ahead of.
    void open_to_group(std::int64_t slot) const noexcept;
    // FFN rank `rank` is done with a slot: to the layer's next rank, or back to attention for the next layer.
    void pass_on(std::int64_t slot, int rank) const noexcept;
    // Take a slot that is ready to start back for the host; false when it is not, or has just been started.
    bool take(std::int64_t slot) const noexcept;
    // How long a worker without work spins: long enough for another's stage while a batch is on its way, else hardly.
    std::chrono::microseconds patience() const noexcept;
    // Make every worker return, wherever it waits.
    void abort() const noexcept;

  private:
    Board(int fd, std::byte* base, std::size_t nbytes);
    std::int64_t mailbox_size() const noexcept { return static_cast<std::int64_t>(shape().max_rows) * shape().max_hidden; }
    std::size_t lay_out(const BoardShape& shape);

    int fd_;
    std::byte* base_;
    std::size_t nbytes_;
    ModelEntry* models_ = nullptr;
    Slot* slots_ = nullptr;
    Seat* seats_ = nullptr;
    std::int64_t* stamps_ = nullptr;
    Event* events_ = nullptr;
    std::int32_t *tokens_ = nullptr, *tables_ = nullptr;
    float *normed_ = nullptr, *delta_ = nullptr, *partials_ = nullptr;
};

}  // namespace poolweave::decode
