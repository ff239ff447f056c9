// The KV side's worker: attention, sampling, and which batch goes next.
#pragma once

#include <cstdint>
#include <vector>

#include "core/decode/attention_stack.hpp"
#include "core/decode/board.hpp"
#include "core/decode/sampler.hpp"

namespace poolweave::decode {

// Advances the batches of one attention rank whose turn is attention. `run` is control lowering: it starts passes, at most
// the board's `in_flight` at a time, and hands batches to the FFN workers without the host. `step` does one stage that the host
// names. A slot's group has each its share of the heads, and each keeps the residual: all work on a turn at once, put what
// their heads add on the board, and the last one to arrive adds up, in the order of ranks, and hands on; the others do when
// the next layer's turn comes. The leader alone embeds and samples. One thread runs it; models are added and taken away by another while none of their batches is on the board.
class AttentionWorker {
  public:
    AttentionWorker(const Board& board, int rank);

    // Serve model `index` of the board. Throws kConfig where stack, KV and board do not fit.
    void activate(std::int64_t index, AttentionStack* stack, const KvView& kv);
    void deactivate(std::int64_t index) noexcept;

    // Until the board is aborted or the process that started this one is gone.
    void run();

    // One stage of the batch in `slot`: the attention of its layer, or the sampling turn after the last.
    // Throws kConfig for a slot or a model that is not there.
    void step(std::int64_t slot);

    std::uint64_t stages() const noexcept { return stages_.load(std::memory_order_relaxed); }

  private:
    struct Model {
        std::atomic<AttentionStack*> stack{nullptr};
        KvView kv;
        double served = 0.0;  // cost of the passes it had
        bool active = false;  // had a batch on the board when last looked at
    };

    bool mine(const Slot& slot) const noexcept { return slot.attention == rank_; }
    bool awaits(const Slot& slot) const noexcept;
    bool work();
    std::int64_t oldest() const noexcept;
    std::int64_t choose() noexcept;
    void note_active() noexcept;
    bool stage(std::int64_t index);
    float* residual(std::int64_t index) noexcept;
    bool attend(std::int64_t index, Slot& slot, AttentionStack& stack);
    bool attend_share(std::int64_t index, Slot& slot, AttentionStack& stack);
    void add_partials(std::int64_t index, const Slot& slot, std::int64_t layer, std::int64_t hidden);
    void sample(std::int64_t index, Slot& slot, AttentionStack& stack);
    bool append(std::int64_t seat, const float* logits, std::int64_t vocab);

    const Board& board_;
    int rank_;
    std::vector<Model> models_;
    std::vector<float> residual_;  // [slots, max_rows, max_hidden]: never leaves the KV side
    std::vector<char> pending_;    // [slots]: the layer before's partial sums are not yet in the residual
    std::vector<float> ends_, logits_;
    std::vector<Sequence> sequences_;
    Sampler sampler_;
    std::atomic<std::uint64_t> stages_{0};
};

}  // namespace poolweave::decode
