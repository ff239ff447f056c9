// The KV side of one model: embedding, attention layers with their norms, and the head. The FFN comes from outside.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/decode/attention.hpp"

namespace poolweave::decode {

struct AttentionLayer {
    RmsNorm input_norm, post_norm;
    AttentionWeights weights;
};

// What is not in a layer. `head` may be the embedding itself (tied). Empty on a rank that has only heads of the layers.
struct Ends {
    Packed embedding;  // [vocab, hidden]
    RmsNorm norm;
    Packed head;  // [vocab, hidden]
};

// Runs one model's layers up to the pool boundary. Owns scratch, borrows weights; one thread at a time.
//
// A token's way: embed -> attend(0) -> [FFN outside] -> attend(1) ... -> logits. `delta` is what the FFN of the layer
// before returned, added to the residual first; null before the first layer.
class AttentionStack {
  public:
    AttentionStack(const Kernels& kernels, std::int64_t hidden, const Ends& ends, Rope rope);

    // Append a layer. Throws kConfig where its matrices do not fit.
    void add(const AttentionLayer& layer);

    std::int64_t layers() const noexcept { return static_cast<std::int64_t>(layers_.size()); }
    std::int64_t hidden() const noexcept { return hidden_; }
    std::int64_t vocab() const noexcept { return ends_.embedding.rows; }

    // residual [batch, hidden] = embedding rows. Throws kConfig for a token outside the vocabulary: any, without ends.
    void embed(std::span<const std::int32_t> tokens, float* residual) const;

    // residual += delta; residual += attention(norm(residual)); normed = post_norm(residual): what crosses the boundary.
    // Throws kConfig for a layer or block that is not there and for KV of another shape.
    void attend(std::int64_t layer, const KvView& kv, std::span<const Sequence> sequences, const float* delta,
                float* residual, float* normed);

    // The two halves of that, for a stack that has some of the heads. `part`: out [batch, hidden] = what these heads' attention
    // of norm(residual) adds to the residual. `close`: normed = post_norm(residual), once all heads' parts were added.
    void part(std::int64_t layer, const KvView& kv, std::span<const Sequence> sequences, const float* residual, float* out);
    void close(std::int64_t layer, std::int64_t batch, const float* residual, float* normed) const;

    // logits [batch, vocab] of residual + delta.
    void logits(int batch, const float* delta, float* residual, float* logits);

  private:
    const Kernels& kernels_;
    std::int64_t hidden_;
    Ends ends_;
    Rope rope_;
    std::vector<AttentionLayer> layers_;
    Scratch angles_, normed_, out_;
    AttentionScratch scratch_;
};

}  // namespace poolweave::decode
