// The weights pool's worker: one rank's FFN layers of all models.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/decode/board.hpp"
#include "core/decode/ffn.hpp"

namespace poolweave::decode {

// Runs the FFN of batches whose layer this rank owns. `run` is control lowering, `step` one stage that the host names.
// Threads as for AttentionWorker.
class FfnWorker {
  public:
    FfnWorker(const Board& board, int rank);

    // Serve model `index`: `stack` holds the layers that the board gives to this rank, `places` says where each of the
    // model's layers lies in it, -1 for those of other ranks. Throws kConfig where they do not fit.
    void activate(std::int64_t index, FfnStack* stack, std::vector<std::int32_t> places);
    void deactivate(std::int64_t index) noexcept;

    // Until the board is aborted or the process that started this one is gone.
    void run();

    // The FFN of the layer that the batch in `slot` is at. Throws kConfig for what is not there.
    void step(std::int64_t slot);

    std::uint64_t stages() const noexcept { return stages_.load(std::memory_order_relaxed); }

  private:
    struct Model {
        std::atomic<FfnStack*> stack{nullptr};
        std::vector<std::int32_t> places;
    };

    bool work();

    const Board& board_;
    int rank_;
    std::vector<Model> models_;
    std::atomic<std::uint64_t> stages_{0};
};

}  // namespace poolweave::decode
