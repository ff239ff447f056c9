#include "core/decode/ffn_worker.hpp"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr std::int64_t kLookUpMs = 1000;  // how often a sleeping worker looks whether its parent lives

}  // namespace

FfnWorker::FfnWorker(const Board& board, int rank) : board_(board), rank_(rank), models_(board.shape().models) {
    if (rank < 0 || rank >= static_cast<int>(kMaxRanks))
        throw Error(Code::kConfig, "FFN rank " + std::to_string(rank) + " of at most " + std::to_string(kMaxRanks));
}

void FfnWorker::activate(std::int64_t index, FfnStack* stack, std::vector<std::int32_t> places) {
    const bool fits = index >= 0 && index < static_cast<std::int64_t>(models_.size()) && places.size() <= kMaxLayers &&
                      stack->hidden() <= board_.shape().max_hidden &&
                      std::all_of(places.begin(), places.end(), [&](std::int32_t p) { return p >= -1 && p < stack->layers(); });
    if (!fits) throw Error(Code::kConfig, "FFN layers of model " + std::to_string(index) + " do not fit the board");
    models_[index].places = std::move(places);
    models_[index].stack.store(stack, std::memory_order_release);
}

void FfnWorker::deactivate(std::int64_t index) noexcept { models_[index].stack.store(nullptr, std::memory_order_release); }

void FfnWorker::run() {
    const pid_t parent = getppid();
    Bell& bell = board_.header().ffn[rank_];
    Waiter waiter;
    while (!board_.aborted() && getppid() == parent) {
        const std::uint32_t seen = bell.rung.load(std::memory_order_acquire);
        while (work())
            if (board_.aborted()) return;
        waiter.rest(bell, seen, kLookUpMs, board_.patience());
    }
}

bool FfnWorker::work() {
    std::int64_t found = -1;
    for (std::int64_t i = 0; i < board_.shape().slots; ++i) {
        const Slot& slot = board_.slot(i);
        if (slot.turn.load(std::memory_order_acquire) != turn_of_rank(rank_)) continue;
        if (found < 0 || slot.ticket < board_.slot(found).ticket) found = i;
    }
    if (found < 0) return false;
    step(found);
    board_.pass_on(found, rank_);
    return true;
}

void FfnWorker::step(std::int64_t index) {
    if (index < 0 || index >= board_.shape().slots) throw Error(Code::kConfig, "no slot " + std::to_string(index));
    const Slot& slot = board_.slot(index);
    Model& model = models_[slot.model];
    FfnStack* stack = model.stack.load(std::memory_order_acquire);
    const bool here = stack != nullptr && slot.layer < static_cast<std::int32_t>(model.places.size()) && model.places[slot.layer] >= 0;
    if (!here)
        throw Error(Code::kConfig, "layer " + std::to_string(slot.layer) + " of model " + std::to_string(slot.model) +
                                       " is not on FFN rank " + std::to_string(rank_));
    stages_.fetch_add(1, std::memory_order_relaxed);
    const std::int64_t start = now_ns();
    const bool onto = next_rank(board_.model(slot.model).owners[slot.layer], -1) < rank_;  // others added their part before
    stack->forward(model.places[slot.layer], board_.normed(index), slot.rows, board_.delta(index), onto);
    board_.record(kMaxRanks + rank_, index, start);
}

}  // namespace poolweave::decode
