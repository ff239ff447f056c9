#include "core/decode/attention.hpp"

#include <algorithm>
#include <string>

#include "core/decode/linear.hpp"
#include "core/error.hpp"

namespace poolweave::decode {

namespace {

float* sized(std::vector<float>& scratch, std::int64_t numbers) {
    if (scratch.size() < static_cast<std::size_t>(numbers)) scratch.resize(static_cast<std::size_t>(numbers));
    return scratch.data();
}

// Calls `use(block's slot, first token, tokens in it)` for each block of a sequence, in order.
template <class Use>
void each_block(const KvView& kv, const Sequence& sequence, Use use) {
    const std::int64_t total = sequence.num_tokens();
    for (std::int64_t first = 0, i = 0; first < total; first += kv.block_tokens, ++i)
        use(sequence.slots[i], first, std::min(kv.block_tokens, total - first));
}

// Scores [rows, n] become weights, unnormalised; the divisor of each row goes to `inverse`.
void soften(const Kernels& kernels, float* scores, std::int64_t rows, std::int64_t n, float scale, float* inverse) {
    for (std::int64_t r = 0; r < rows; ++r) inverse[r] = 1.0F / kernels.softmax(scores + r * n, n, scale);
}

void scale_rows(float* values, std::int64_t rows, std::int64_t cols, const float* factors) {
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < cols; ++c) values[r * cols + c] *= factors[r];
}

void store_kv(const AttentionCall& call, std::size_t row, std::int64_t part, const float* values) {
    const Sequence& sequence = call.sequences[row];
    const std::int64_t block = sequence.position / call.kv.block_tokens, token = sequence.position % call.kv.block_tokens;
    call.kv.store(sequence.slots[block], call.layer, part, token, values);
}

// Head norm, if there is one, then rope, over `count` heads of one row.
void prepare_heads(const AttentionCall& call, const RmsNorm& norm, float* heads, std::int64_t count, std::int64_t dim,
                   std::size_t row) {
    for (std::int64_t h = 0; h < count; ++h) {
        float* head = heads + h * dim;
        if (norm) call.kernels.rms_norm(head, norm.weight, norm.eps, head, dim);
        call.rope.rotate(head, call.angles + static_cast<std::int64_t>(row) * call.rope.dim());
    }
}

// One row over its sequence; out [heads * head_dim].
void attend_row(const GroupedWeights& w, const AttentionCall& call, std::size_t row, const float* query, float* out,
                AttentionScratch& scratch) {
    const KvView& kv = call.kv;
    const Sequence& sequence = call.sequences[row];
    const std::int64_t n = sequence.num_tokens(), group = w.heads / w.kv_heads, dim = w.head_dim;
    float *scores = sized(scratch.scores, w.heads * n), *inverse = sized(scratch.mixed, w.heads);
    each_block(kv, sequence, [&](std::int32_t slot, std::int64_t first, std::int64_t tokens) {
        for (std::int64_t h = 0; h < w.kv_heads; ++h)
            call.kernels.dot(kv.rows(slot, call.layer, 0, h, tokens, dim), query + h * group * dim, dim,
                             static_cast<int>(group), scores + h * group * n + first, n);
    });
    soften(call.kernels, scores, w.heads, n, w.scale, inverse);
    std::fill_n(out, w.heads * dim, 0.0F);
    each_block(kv, sequence, [&](std::int32_t slot, std::int64_t first, std::int64_t tokens) {
        for (std::int64_t h = 0; h < w.kv_heads; ++h)
            call.kernels.mix(kv.rows(slot, call.layer, 1, h, tokens, dim), scores + h * group * n + first, n,
                             static_cast<int>(group), out + h * group * dim, dim);
    });
    scale_rows(out, w.heads, dim, inverse);
}

void run(const GroupedWeights& w, const AttentionCall& call, AttentionScratch& scratch) {
    const int batch = static_cast<int>(call.sequences.size());
    const std::int64_t q_size = w.heads * w.head_dim, kv_size = w.kv_heads * w.head_dim;
    float *query = sized(scratch.query, batch * q_size), *heads = sized(scratch.heads, batch * q_size);
    float *key = sized(scratch.key, batch * kv_size), *value = sized(scratch.value, batch * kv_size);
    apply(call.kernels, w.q, call.x, call.hidden, batch, query, q_size);
    apply(call.kernels, w.k, call.x, call.hidden, batch, key, kv_size);
    apply(call.kernels, w.v, call.x, call.hidden, batch, value, kv_size);
    for (int b = 0; b < batch; ++b) {
        const auto row = static_cast<std::size_t>(b);
        prepare_heads(call, w.q_norm, query + b * q_size, w.heads, w.head_dim, row);
        prepare_heads(call, w.k_norm, key + b * kv_size, w.kv_heads, w.head_dim, row);
        store_kv(call, row, 0, key + b * kv_size);
        store_kv(call, row, 1, value + b * kv_size);
        attend_row(w, call, row, query + b * q_size, heads + b * q_size, scratch);
    }
    apply(call.kernels, w.o, heads, q_size, batch, call.out, call.hidden);
}

// Queries of all rows, [batch, heads * (nope + rope)], the rope part rotated.
float* latent_queries(const LatentWeights& w, const AttentionCall& call, AttentionScratch& scratch) {
    const int batch = static_cast<int>(call.sequences.size());
    const std::int64_t head = w.nope + w.rope, size = w.heads * head;
    float* query = sized(scratch.query, batch * size);
    if (w.q_a) {
        const std::int64_t rank = w.q_a.weight.rows;
        float* low = sized(scratch.key, batch * rank);
        apply(call.kernels, w.q_a, call.x, call.hidden, batch, low, rank);
        for (int b = 0; b < batch; ++b)
            call.kernels.rms_norm(low + b * rank, w.q_norm.weight, w.q_norm.eps, low + b * rank, rank);
        apply(call.kernels, w.q_b, low, rank, batch, query, size);
    } else {
        apply(call.kernels, w.q_b, call.x, call.hidden, batch, query, size);
    }
    for (int b = 0; b < batch; ++b)
        for (std::int64_t h = 0; h < w.heads; ++h)
            call.rope.rotate(query + b * size + h * head + w.nope, call.angles + b * call.rope.dim());
    return query;
}

void store_latents(const LatentWeights& w, const AttentionCall& call, AttentionScratch& scratch) {
    const int batch = static_cast<int>(call.sequences.size());
    const std::int64_t width = w.rank + w.rope;
    float* latent = sized(scratch.latent, batch * width);
    apply(call.kernels, w.kv_a, call.x, call.hidden, batch, latent, width);
    for (int b = 0; b < batch; ++b) {
        float* row = latent + b * width;
        call.kernels.rms_norm(row, w.kv_norm.weight, w.kv_norm.eps, row, w.rank);
        call.rope.rotate(row + w.rank, call.angles + b * call.rope.dim());
        store_kv(call, static_cast<std::size_t>(b), 0, row);
    }
}

// The key half of `expand` goes into the query: [batch, heads, rank + rope], comparable with stored latents.
float* absorb(const LatentWeights& w, const AttentionCall& call, const float* query, AttentionScratch& scratch) {
    const int batch = static_cast<int>(call.sequences.size());
    const std::int64_t head = w.nope + w.rope, width = w.rank + w.rope;
    float* absorbed = sized(scratch.absorbed, batch * w.heads * width);
    std::fill_n(absorbed, batch * w.heads * width, 0.0F);
    for (std::int64_t h = 0; h < w.heads; ++h) {
        const Matrix keys = w.expand.weight.slice(h * (w.nope + w.v_dim), w.nope);
        call.kernels.mix(keys, query + h * head, w.heads * head, batch, absorbed + h * width, w.heads * width);
        for (int b = 0; b < batch; ++b) {
            const float* rope = query + (b * w.heads + h) * head + w.nope;
            std::copy_n(rope, w.rope, absorbed + (b * w.heads + h) * width + w.rank);
        }
    }
    return absorbed;
}

// One row over its latents; mixed [heads, rank].
void attend_latents(const LatentWeights& w, const AttentionCall& call, std::size_t row, const float* absorbed, float* mixed,
                    AttentionScratch& scratch) {
    const KvView& kv = call.kv;
    const Sequence& sequence = call.sequences[row];
    const std::int64_t n = sequence.num_tokens(), width = w.rank + w.rope;
    const int heads = static_cast<int>(w.heads);
    float *scores = sized(scratch.scores, w.heads * n), *inverse = sized(scratch.value, w.heads);
    each_block(kv, sequence, [&](std::int32_t slot, std::int64_t first, std::int64_t tokens) {
        call.kernels.dot(kv.rows(slot, call.layer, 0, 0, tokens, width), absorbed, width, heads, scores + first, n);
    });
    soften(call.kernels, scores, w.heads, n, w.scale, inverse);
    std::fill_n(mixed, w.heads * w.rank, 0.0F);
    each_block(kv, sequence, [&](std::int32_t slot, std::int64_t first, std::int64_t tokens) {
        call.kernels.mix(kv.rows(slot, call.layer, 0, 0, tokens, w.rank), scores + first, n, heads, mixed, w.rank);
    });
    scale_rows(mixed, w.heads, w.rank, inverse);
}

void run(const LatentWeights& w, const AttentionCall& call, AttentionScratch& scratch) {
    const int batch = static_cast<int>(call.sequences.size());
    const std::int64_t width = w.rank + w.rope, size = w.heads * w.v_dim;
    const float* query = latent_queries(w, call, scratch);
    store_latents(w, call, scratch);
    const float* absorbed = absorb(w, call, query, scratch);
    float* mixed = sized(scratch.mixed, batch * w.heads * w.rank);
    for (int b = 0; b < batch; ++b)
        attend_latents(w, call, static_cast<std::size_t>(b), absorbed + b * w.heads * width, mixed + b * w.heads * w.rank,
                       scratch);
    float* heads = sized(scratch.heads, batch * size);
    for (std::int64_t h = 0; h < w.heads; ++h) {
        const Matrix values = w.expand.weight.slice(h * (w.nope + w.v_dim) + w.nope, w.v_dim);
        call.kernels.dot(values, mixed + h * w.rank, w.heads * w.rank, batch, heads + h * w.v_dim, size);
    }
    apply(call.kernels, w.o, heads, size, batch, call.out, call.hidden);
}

void require(bool holds, const std::string& message) {
    if (!holds) throw Error(Code::kConfig, message);
}

void check(const GroupedWeights& w, std::int64_t hidden, const Rope& rope) {
    require(w.heads > 0 && w.kv_heads > 0 && w.heads % w.kv_heads == 0,
            std::to_string(w.heads) + " heads over " + std::to_string(w.kv_heads) + " KV heads");
    require(rope.dim() == w.head_dim, "rope turns " + std::to_string(rope.dim()) + " of " + std::to_string(w.head_dim));
    check_linear("q_proj", w.q, w.heads * w.head_dim, hidden);
    check_linear("k_proj", w.k, w.kv_heads * w.head_dim, hidden);
    check_linear("v_proj", w.v, w.kv_heads * w.head_dim, hidden);
    check_linear("o_proj", w.o, hidden, w.heads * w.head_dim);
}

void check(const LatentWeights& w, std::int64_t hidden, const Rope& rope) {
    require(w.heads > 0 && w.rank > 0 && w.nope > 0 && w.v_dim > 0, "latent attention has positive sizes");
    require(rope.dim() == w.rope, "rope turns " + std::to_string(rope.dim()) + " of " + std::to_string(w.rope));
    if (w.q_a) check_linear("q_a_proj", w.q_a, w.q_a.weight.rows, hidden);
    require(static_cast<bool>(w.q_a) == static_cast<bool>(w.q_norm), "q_a_proj comes with its norm");
    check_linear(w.q_a ? "q_b_proj" : "q_proj", w.q_b, w.heads * (w.nope + w.rope), w.q_a ? w.q_a.weight.rows : hidden);
    check_linear("kv_a_proj_with_mqa", w.kv_a, w.rank + w.rope, hidden);
    require(static_cast<bool>(w.kv_norm), "kv_a_layernorm is missing");
    check_linear("kv_b_proj", w.expand, w.heads * (w.nope + w.v_dim), w.rank);
    check_linear("o_proj", w.o, hidden, w.heads * w.v_dim);
}

}  // namespace

void check_attention(const AttentionWeights& weights, std::int64_t hidden, const Rope& rope) {
    std::visit([&](const auto& w) { check(w, hidden, rope); }, weights);
}

void check_layout(const AttentionWeights& weights, const KvView& kv) {
    std::int64_t parts = 1, heads = 1, dim = 0;
    if (const auto* grouped = std::get_if<GroupedWeights>(&weights)) {
        parts = 2, heads = grouped->kv_heads, dim = grouped->head_dim;
    } else {
        const auto& latent = std::get<LatentWeights>(weights);
        dim = latent.rank + latent.rope;
    }
    require(kv.parts == parts && kv.heads == heads && kv.dim == dim,
            "KV of " + std::to_string(kv.parts) + " parts of " + std::to_string(kv.heads) + " x " + std::to_string(kv.dim) +
                ", attention keeps " + std::to_string(parts) + " of " + std::to_string(heads) + " x " + std::to_string(dim));
}

void attend(const AttentionWeights& weights, const AttentionCall& call, AttentionScratch& scratch) {
    std::visit([&](const auto& w) { run(w, call, scratch); }, weights);
}

}  // namespace poolweave::decode
