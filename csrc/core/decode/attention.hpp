// Attention of one decode step over paged KV: grouped heads (MHA, GQA, MQA) and absorbed latents (MLA).
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "core/decode/kernels.hpp"
#include "core/decode/kv_view.hpp"
#include "core/decode/matrix.hpp"
#include "core/decode/rope.hpp"

namespace poolweave::decode {

struct GroupedWeights {
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
    Linear q, k, v, o;
    RmsNorm q_norm, k_norm;  // over each head; may be empty
    float scale = 1.0F;
};

// `expand` is the checkpoint's kv_b_proj, [heads * (nope + v_dim), rank]: its key rows are absorbed into the query and
// its value rows applied to the mixed latent, so that no key or value is ever expanded.
struct LatentWeights {
    std::int64_t heads = 0, rank = 0, nope = 0, rope = 0, v_dim = 0;
    Linear q_a, q_b;  // q_a may be empty: then q_b maps the hidden state itself
    RmsNorm q_norm;
    Linear kv_a;
    RmsNorm kv_norm;
    Linear expand, o;
    float scale = 1.0F;
};

using AttentionWeights = std::variant<GroupedWeights, LatentWeights>;

// Throws kConfig where the matrices do not fit each other, `hidden`, the rope or the KV layout.
void check_attention(const AttentionWeights& weights, std::int64_t hidden, const Rope& rope);
void check_layout(const AttentionWeights& weights, const KvView& kv);

// Working memory of `attend`, kept from call to call.
struct AttentionScratch {
    std::vector<float> query, key, value, latent, absorbed, scores, mixed, heads;
};

// out [batch, hidden] = attention of x [batch, hidden] (normed), each row over its own sequence. Writes the row's KV at
// its position first. `angles` [batch, rope.dim()] are the positions' rope tables.
struct AttentionCall {
    const Kernels& kernels;
    const Rope& rope;
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
