// Attention of one decode step over paged KV: grouped heads (MHA, GQA, MQA) and absorbed latents (MLA).
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "core/decode/kernels.hpp"
#include "core/decode/kv_view.hpp"
#include "core/decode/linear.hpp"
#include "core/decode/matrix.hpp"
#include "core/decode/rope.hpp"
#include "core/decode/scratch.hpp"

namespace poolweave::decode {

struct GroupedWeights {
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
    Linear q, k, v, o;
    RmsNorm q_norm, k_norm;  // over each head; may be empty
    float scale = 1.0F;
};

// `absorb` and `values` hold each head's part of the checkpoint's kv_b_proj: the query mixes its key rows, [nope, rank], into
// latent form, and its value rows, [v_dim, rank], take the mixed latent to the head, so that no key or value is ever expanded.
struct LatentWeights {
    std::int64_t heads = 0, rank = 0, nope = 0, rope = 0, v_dim = 0;
    Linear q_a, q_b;  // q_a may be empty: then q_b maps the hidden state itself
    RmsNorm q_norm;
    Linear kv_a;
    RmsNorm kv_norm;
    std::vector<Matrix> absorb;
    std::vector<Packed> values;
    Linear o;
    float scale = 1.0F;

    // Fills `absorb` and `values` from kv_b_proj [heads * (nope + v_dim), rank]. Throws kConfig for another shape.
    void expand(const Matrix& kv_b, PackedStore& store);
};

using AttentionWeights = std::variant<GroupedWeights, LatentWeights>;

// Throws kConfig where the matrices do not fit each other, `hidden`, the rope or the KV layout.
void check_attention(const AttentionWeights& weights, std::int64_t hidden, const Rope& rope);
void check_layout(const AttentionWeights& weights, const KvView& kv);

// Working memory of `attend`, kept from call to call.
struct AttentionScratch {
    Scratch query, key, value, latent, absorbed, arranged, scores, mixed, heads;
    std::vector<const void*> blocks;
};

// out [batch, hidden] = attention of x [batch, hidden] (normed), each row over its own sequence. Writes the row's KV at
// its position first. `angles` [batch, rope.dim()] are the positions' rope tables.
struct AttentionCall {
    const Kernels& kernels;
    Rope& rope;
    const KvView& kv;
    std::int64_t layer;
    std::span<const Sequence> sequences;
    const float* angles;
    const float* x;
    std::int64_t hidden;
    float* out;
};

void attend(const AttentionWeights& weights, const AttentionCall& call, AttentionScratch& scratch);

}  // namespace poolweave::decode
