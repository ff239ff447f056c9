// The weights pool's half of a layer: from normed hidden states to what is added to the residual.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/decode/kernels.hpp"
#include "core/decode/linear.hpp"
#include "core/decode/routing.hpp"
#include "core/decode/scratch.hpp"

namespace poolweave::decode {

// down(silu(gate(x)) * up(x)); a dense FFN, or the shared experts of a mixture together.
struct DenseFfn {
    Linear gate, up, down;

    explicit operator bool() const noexcept { return static_cast<bool>(gate); }
};

// gate_up [2 * inner, hidden], gate first; down [hidden, inner].
struct Expert {
    Packed gate_up, down;
};

// `experts` are those whose weights are here. `places` says which of them each expert is, -1 for one that another rank
// has; empty: all are here, in order.
struct MoeFfn {
    Routing routing;
    Packed router;
    std::vector<Expert> experts;
    DenseFfn shared;  // may be empty
    std::vector<std::int32_t> places;
};

struct FfnLayer {
    DenseFfn dense;  // used when `moe` is empty
    std::optional<MoeFfn> moe;
};

// Runs the FFN layers of one model. Owns scratch, borrows weights; one thread at a time.
class FfnStack {
  public:
    FfnStack(const Kernels& kernels, std::int64_t hidden) : kernels_(kernels), hidden_(hidden) {}

    // Append a layer. Throws kConfig where its matrices do not fit each other.
    void add(const FfnLayer& layer);

    std::int64_t layers() const noexcept { return static_cast<std::int64_t>(layers_.size()); }
    std::int64_t hidden() const noexcept { return hidden_; }

    // y [batch, hidden] = FFN of x [batch, hidden], or y += it where `onto`: other ranks had their part before.
    // Reads the weights of each chosen expert once a call. Throws kConfig for a layer that is not there.
    void forward(std::int64_t layer, const float* x, int batch, float* y, bool onto = false);

    // Weight bytes that one token of `layer` reads.
    std::int64_t active_bytes(std::int64_t layer) const;

  private:
    struct Share {  // one row's part in one expert
        int expert, row;  // `expert`: its place here
        float weight;
    };

    void run_dense(const DenseFfn& ffn, const float* x, int batch, float* y);
    void add_dense(const DenseFfn& ffn, const float* x, int batch, float* y);
    void choose(const MoeFfn& moe, Router& router, const float* x, int batch);
    void run_experts(const MoeFfn& moe, const float* x, int batch, float* y);
    void run_expert(const Expert& expert, const Share* shares, int rows, const float* x, float* y);

    const Kernels& kernels_;
    std::int64_t hidden_;
    std::vector<FfnLayer> layers_;
    std::vector<Router> routers_;  // one a layer; dense ones hold a router that is never asked
    Scratch inner_, logits_, gathered_, out_;
    std::vector<Choice> choices_;
    std::vector<Share> shares_;
};

}  // namespace poolweave::decode
