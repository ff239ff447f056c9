#include "core/decode/attention_worker.hpp"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr std::int64_t kLookUpMs = 1000;  // how often a sleeping worker looks whether its parent lives

bool in_flight(Turn turn) { return turn == Turn::kAttention || turn >= Turn::kFfn; }

}  // namespace

AttentionWorker::AttentionWorker(const Board& board, int rank)
    : board_(board), rank_(rank), models_(board.shape().models),
      residual_(static_cast<std::size_t>(board.shape().slots) * board.shape().max_rows * board.shape().max_hidden),
      pending_(board.shape().slots) {
    if (rank < 0 || rank >= static_cast<int>(kMaxRanks))
        throw Error(Code::kConfig, "attention rank " + std::to_string(rank) + " of at most " + std::to_string(kMaxRanks));
}

void AttentionWorker::activate(std::int64_t index, AttentionStack* stack, const KvView& kv) {
    if (index < 0 || index >= static_cast<std::int64_t>(models_.size()))
        throw Error(Code::kConfig, "model " + std::to_string(index) + " of a board of " + std::to_string(models_.size()));
    const BoardShape& shape = board_.shape();
    if (stack->hidden() > shape.max_hidden || stack->layers() > kMaxLayers || kv.block_tokens != shape.block_tokens)
        throw Error(Code::kConfig, "a model of hidden " + std::to_string(stack->hidden()) + ", " +
                                       std::to_string(stack->layers()) + " layers and blocks of " +
                                       std::to_string(kv.block_tokens) + " does not fit the board");
    models_[index].kv = kv;
    models_[index].stack.store(stack, std::memory_order_release);
}

void AttentionWorker::deactivate(std::int64_t index) noexcept {
    models_[index].stack.store(nullptr, std::memory_order_release);
}

void AttentionWorker::run() {
    const pid_t parent = getppid();
    Bell& bell = board_.header().attention[rank_];
    Waiter waiter;
    while (!board_.aborted() && getppid() == parent) {
        const std::uint32_t seen = bell.rung.load(std::memory_order_acquire);
        while (work())
            if (board_.aborted()) return;
        waiter.rest(bell, seen, kLookUpMs, board_.patience());
    }
}

// One stage, if there is one: batches that came back first, then a new pass while there is room in flight.
bool AttentionWorker::work() {
    std::int64_t index = oldest();
    if (index < 0) index = choose();
    if (index < 0) return false;
    Slot& slot = board_.slot(index);
    if (!stage(index)) return true;  // the slot is the others' of its group
    const ModelEntry& model = board_.model(slot.model);
    if (slot.layer < model.num_layers) {
        slot.ticket = board_.next_ticket();
        const int rank = next_rank(model.owners[slot.layer], -1);
        slot.turn.store(turn_of_rank(rank), std::memory_order_release);  // from here on the slot is that rank's
        board_.header().ffn[rank].ring();
        return true;
    }
    const bool over = std::any_of(slot.seats, slot.seats + slot.rows, [&](std::int32_t seat) {
        return board_.seat(seat).finish.load(std::memory_order_relaxed) != Finish::kRunning;
    });
    slot.layer = 0;
    slot.ticket = board_.next_ticket();
    slot.arrived.store(slot.group & ~(1U << rank_), std::memory_order_relaxed);  // the others wait for the next embedding
    if (over || slot.called.load(std::memory_order_acquire) != 0) {
        slot.turn.store(Turn::kHost, std::memory_order_release);
        board_.header().host.ring();
    } else {
        slot.turn.store(Turn::kReady, std::memory_order_release);
    }
    return true;
}

bool AttentionWorker::awaits(const Slot& slot) const noexcept {
    const std::uint32_t own = 1U << rank_;
    return (slot.group & own) != 0 && (slot.arrived.load(std::memory_order_acquire) & own) == 0;
}

std::int64_t AttentionWorker::oldest() const noexcept {
    std::int64_t found = -1;
    for (std::int64_t i = 0; i < board_.shape().slots; ++i) {
        const Slot& slot = board_.slot(i);
        if (slot.turn.load(std::memory_order_acquire) != Turn::kAttention || !awaits(slot)) continue;
        if (found < 0 || slot.ticket < board_.slot(found).ticket) found = i;
    }
    return found;
}

// The same rule as the pipeline's: the ready model that had the least service, its oldest batch.
std::int64_t AttentionWorker::choose() noexcept {
    note_active();
    std::uint32_t flying = 0;
    std::int64_t found = -1;
    for (std::int64_t i = 0; i < board_.shape().slots; ++i) {
        const Slot& slot = board_.slot(i);
        const Turn turn = slot.turn.load(std::memory_order_acquire);
        if (!mine(slot)) continue;
        flying += in_flight(turn);
        if (turn != Turn::kReady) continue;
        if (found < 0) found = i;
        const Slot& best = board_.slot(found);
        const double mine = models_[slot.model].served, its = models_[best.model].served;
        if (mine < its || (mine == its && slot.ticket < best.ticket)) found = i;
    }
    if (found < 0 || flying >= board_.header().in_flight.load(std::memory_order_relaxed)) return -1;
    Slot& slot = board_.slot(found);
    const ModelEntry& model = board_.model(slot.model);
    Turn ready = Turn::kReady;
    if (!slot.turn.compare_exchange_strong(ready, Turn::kAttention)) return -1;  // the host took it back
    models_[slot.model].served += static_cast<double>(model.num_layers) * model.layer_cost;
    return found;
}

// A model back from idleness starts level with the least served active one: it neither catches up nor is held back.
void AttentionWorker::note_active() noexcept {
    for (std::size_t m = 0; m < models_.size(); ++m) {
        bool present = false;
        for (std::int64_t i = 0; i < board_.shape().slots && !present; ++i) {
            const Slot& slot = board_.slot(i);
            const Turn turn = slot.turn.load(std::memory_order_acquire);
            present = turn != Turn::kIdle && turn != Turn::kHost && mine(slot) && slot.model == static_cast<std::int32_t>(m);
        }
        if (present && !models_[m].active) {
            double level = -1.0;
            for (const Model& other : models_)
                if (other.active && (level < 0.0 || other.served < level)) level = other.served;
            models_[m].served = std::max(models_[m].served, level);
        }
        models_[m].active = present;
    }
}

void AttentionWorker::step(std::int64_t index) { stage(index); }

// -> whether the slot is this rank's to hand on: it has no group, or all of it are done.
bool AttentionWorker::stage(std::int64_t index) {
    if (index < 0 || index >= board_.shape().slots) throw Error(Code::kConfig, "no slot " + std::to_string(index));
    Slot& slot = board_.slot(index);
    AttentionStack* stack = models_[slot.model].stack.load(std::memory_order_acquire);
    if (stack == nullptr) throw Error(Code::kConfig, "model " + std::to_string(slot.model) + " is not active here");
    stages_.fetch_add(1, std::memory_order_relaxed);
    const std::int64_t start = now_ns();
    if (slot.layer < stack->layers()) return attend(index, slot, *stack);
    sample(index, slot, *stack);
    board_.record(rank_, index, start);
    return true;
}

float* AttentionWorker::residual(std::int64_t index) noexcept {
    return residual_.data() + index * board_.shape().max_rows * board_.shape().max_hidden;
}

bool AttentionWorker::attend(std::int64_t index, Slot& slot, AttentionStack& stack) {
    const std::int64_t start = now_ns();
    sequences_.clear();
    std::int32_t tokens[kMaxRows];
    const int share = share_of(slot.group, rank_);
    for (std::int32_t row = 0; row < slot.rows; ++row) {
        const std::int32_t position = board_.seat(slot.seats[row]).position.load(std::memory_order_relaxed);
        tokens[row] = board_.tokens(slot.seats[row])[position];
        sequences_.push_back({position, board_.table(slot.seats[row], share)});
    }
    if (slot.layer == 0) pending_[index] = 0;  // whatever pass was broken off in this slot
    if (slot.layer == 0 && mine(slot)) stack.embed({tokens, static_cast<std::size_t>(slot.rows)}, residual(index));
    if (std::popcount(static_cast<unsigned>(slot.group)) > 1) return attend_share(index, slot, stack);
    const float* delta = slot.layer == 0 ? nullptr : board_.delta(index);
    stack.attend(slot.layer, models_[slot.model].kv, sequences_, delta, residual(index), board_.normed(index));
    board_.record(rank_, index, start);
    return true;
}

// One rank of several: its heads' part, then whatever the last one to arrive does.
bool AttentionWorker::attend_share(std::int64_t index, Slot& slot, AttentionStack& stack) {
    const std::int64_t start = now_ns(), numbers = slot.rows * stack.hidden(), layer = slot.layer;
    float *own = residual(index), *delta = board_.delta(index);
    if (layer > 0) {
        add_partials(index, slot, layer - 1, stack.hidden());
        for (std::int64_t i = 0; i < numbers; ++i) own[i] += delta[i];
    } else if (mine(slot)) {
        std::copy_n(own, numbers, delta);
        board_.open_to_group(index);
    } else {
        std::copy_n(delta, numbers, own);
    }
    float* out = board_.partial(index, layer, share_of(slot.group, rank_));
    stack.part(layer, models_[slot.model].kv, sequences_, own, out);
    pending_[index] = 1;
    board_.record(rank_, index, start);
    if (!board_.arrive(index, rank_)) return false;
    add_partials(index, slot, layer, stack.hidden());
    stack.close(layer, slot.rows, own, board_.normed(index));
    return true;
}

// The parts of all ranks into the residual, lowest first, unless that was done.
void AttentionWorker::add_partials(std::int64_t index, const Slot& slot, std::int64_t layer, std::int64_t hidden) {
    if (pending_[index] == 0) return;
    pending_[index] = 0;
    float* own = residual(index);
    for (int share = 0; share < std::popcount(static_cast<unsigned>(slot.group)); ++share) {
        const float* part = board_.partial(index, layer, share);
        for (std::int64_t i = 0; i < slot.rows * hidden; ++i) own[i] += part[i];
    }
}

// Rows that still have given tokens to compute need no logits; the others are gathered, so that the head is read once.
void AttentionWorker::sample(std::int64_t index, Slot& slot, AttentionStack& stack) {
    const std::int64_t hidden = stack.hidden();
    const float *residual = this->residual(index), *delta = board_.delta(index);
    add_partials(index, slot, stack.layers() - 1, hidden);
    if (ends_.size() < static_cast<std::size_t>(kMaxRows * hidden)) ends_.resize(kMaxRows * hidden);
    std::int32_t drawing[kMaxRows];
    int count = 0;
    for (std::int32_t row = 0; row < slot.rows; ++row) {
        Seat& seat = board_.seat(slot.seats[row]);
        if (seat.position.load(std::memory_order_relaxed) + 1 < seat.given) {
            seat.position.fetch_add(1, std::memory_order_release);
            continue;
        }
        for (std::int64_t h = 0; h < hidden; ++h) ends_[count * hidden + h] = residual[row * hidden + h] + delta[row * hidden + h];
        drawing[count++] = slot.seats[row];
    }
    if (count == 0) return;
    if (logits_.size() < static_cast<std::size_t>(count * stack.vocab())) logits_.resize(count * stack.vocab());
    stack.logits(count, nullptr, ends_.data(), logits_.data());
    for (int i = 0; i < count; ++i) append(drawing[i], logits_.data() + i * stack.vocab(), stack.vocab());
}

// Draws a seat's next token; -> whether the request goes on.
bool AttentionWorker::append(std::int64_t index, const float* logits, std::int64_t vocab) {
    Seat& seat = board_.seat(index);
    const std::int32_t next = seat.position.load(std::memory_order_relaxed) + 1;
    const Sampling sampling{seat.temperature, seat.top_p, seat.seed};
    const std::int32_t token = sampler_.next({logits, static_cast<std::size_t>(vocab)}, sampling, next);
    Finish finish = Finish::kRunning;
    if (!std::isfinite(logits[token])) {
        finish = Finish::kBroken;  // NaN came out: no token of this row can be trusted
    } else {
        board_.tokens(index)[next] = token;
        board_.stamps(index)[next] = now_ns();
        if (std::find(seat.stops, seat.stops + seat.num_stops, token) != seat.stops + seat.num_stops) finish = Finish::kStop;
        else if (next + 1 >= seat.end) finish = Finish::kLength;
        seat.position.store(next, std::memory_order_release);
    }
    seat.finish.store(finish, std::memory_order_release);
    return finish == Finish::kRunning;
}

}  // namespace poolweave::decode
