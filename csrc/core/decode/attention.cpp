#include "core/decode/attention.hpp"

#include <algorithm>
#include <iterator>
#include <string>

#include "core/decode/linear.hpp"
#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr std::int64_t kNear = 32 << 10;  // bytes of KV that stay in the first-level cache while all heads go over them

// The blocks of a sequence, part by part. Rows of KV are too short for the hardware to see what comes: each block names
// the one after it.
class Walk {
  public:
    Walk(const AttentionCall& call, std::size_t row, std::vector<const void*>& blocks)
        : kv_(call.kv), total_(call.sequences[row].num_tokens()), count_((total_ - 1) / kv_.block_tokens + 1), blocks_(blocks) {
        blocks_.clear();
        for (std::int64_t part = 0; part < kv_.parts; ++part)
            for (std::int64_t i = 0; i < count_; ++i) blocks_.push_back(kv_.plane(call.sequences[row].slots[i], call.layer, part));
        blocks_.push_back(nullptr);
    }

    // `use(rows, head, first token)` for `cols` numbers of every head of a part, some blocks at a time, in order.
    template <class Use>
    void each(std::int64_t part, std::int64_t heads, std::int64_t cols, Use use) const {
        const std::int64_t together = std::max<std::int64_t>(1, kNear / kv_.plane_bytes());
        const void* const* blocks = blocks_.data() + part * count_;
        for (std::int64_t i = 0; i < count_; i += together) {
            const std::int64_t end = std::min(i + together, count_), first = i * kv_.block_tokens;
            const std::int64_t rows = std::min(end * kv_.block_tokens, total_) - first;
            for (std::int64_t h = 0; h < heads; ++h)
                use(KvRows{blocks + i, blocks[end], kv_.block_tokens, rows, cols, kv_.token_stride(), h * kv_.dim, kv_.dtype, false}, h, first);
        }
    }

  private:
    const KvView& kv_;
    std::int64_t total_, count_;
    std::vector<const void*>& blocks_;
};

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
    const Walk walk(call, row, scratch.blocks);
    const std::int64_t n = call.sequences[row].num_tokens(), group = w.heads / w.kv_heads, dim = w.head_dim;
    const std::int64_t size = arranged_size(group, dim);
    float* arranged = sized(scratch.arranged, w.kv_heads * size);
    float *scores = sized(scratch.scores, w.heads * n), *inverse = sized(scratch.mixed, w.heads);
    for (std::int64_t h = 0; h < w.kv_heads; ++h)
        call.kernels.arrange(query + h * group * dim, dim, static_cast<int>(group), dim, call.kv.dtype, arranged + h * size);
    walk.each(0, w.kv_heads, dim, [&](const KvRows& rows, std::int64_t h, std::int64_t first) {
        call.kernels.dot(rows, arranged + h * size, static_cast<int>(group), scores + h * group * n + first, n);
    });
    soften(call.kernels, scores, w.heads, n, w.scale, inverse);
    std::fill_n(out, w.heads * dim, 0.0F);
    walk.each(1, w.kv_heads, dim, [&](const KvRows& rows, std::int64_t h, std::int64_t first) {
        call.kernels.mix(rows, scores + h * group * n + first, n, static_cast<int>(group), out + h * group * dim, dim);
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

// Each query in its latent form, [batch, heads, rank + rope].
float* absorb(const LatentWeights& w, const AttentionCall& call, const float* query, AttentionScratch& scratch) {
    const int batch = static_cast<int>(call.sequences.size());
    const std::int64_t head = w.nope + w.rope, width = w.rank + w.rope;
    float* absorbed = sized(scratch.absorbed, batch * w.heads * width);
    for (std::int64_t h = 0; h < w.heads; ++h) {
        const Matrix& keys = w.absorb[h];
        const void* next = h + 1 < w.heads ? w.absorb[h + 1].data : nullptr;
        const KvRows rows{&keys.data, next, w.nope, w.nope, w.rank, w.rank, 0, keys.dtype, true};
        for (int b = 0; b < batch; ++b) std::fill_n(absorbed + (b * w.heads + h) * width, w.rank, 0.0F);
        call.kernels.mix(rows, query + h * head, w.heads * head, batch, absorbed + h * width, w.heads * width);
        for (int b = 0; b < batch; ++b) {
            float* latent = absorbed + (b * w.heads + h) * width;
            std::copy_n(query + (b * w.heads + h) * head + w.nope, w.rope, latent + w.rank);
        }
    }
    return absorbed;
}

// One row over its latents; mixed [heads, rank].
void attend_latents(const LatentWeights& w, const AttentionCall& call, std::size_t row, const float* absorbed, float* mixed,
                    AttentionScratch& scratch) {
    const Walk walk(call, row, scratch.blocks);
    const std::int64_t n = call.sequences[row].num_tokens(), width = w.rank + w.rope;
    const int heads = static_cast<int>(w.heads);
    float *scores = sized(scratch.scores, w.heads * n), *inverse = sized(scratch.value, w.heads);
    float* arranged = sized(scratch.arranged, arranged_size(heads, width));
    call.kernels.arrange(absorbed, width, heads, width, call.kv.dtype, arranged);
    walk.each(0, 1, width, [&](const KvRows& rows, std::int64_t, std::int64_t first) {
        call.kernels.dot(rows, arranged, heads, scores + first, n);
    });
    soften(call.kernels, scores, w.heads, n, w.scale, inverse);
    std::fill_n(mixed, w.heads * w.rank, 0.0F);
    walk.each(0, 1, w.rank, [&](const KvRows& rows, std::int64_t, std::int64_t first) {
        call.kernels.mix(rows, scores + first, n, heads, mixed, w.rank);
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
    for (std::int64_t h = 0; h < w.heads; ++h)
        call.kernels.multiply(w.values[h], mixed + h * w.rank, w.heads * w.rank, batch, heads + h * w.v_dim, size);
    apply(call.kernels, w.o, heads, size, batch, call.out, call.hidden);
}

void require(bool holds, const std::string& message) {
    if (!holds) throw Error(Code::kConfig, message);
}

void check(const GroupedWeights& w, std::int64_t hidden, const Rope& rope) {
    require(w.heads > 0 && w.kv_heads > 0 && w.heads % w.kv_heads == 0,
            std::to_string(w.heads) + " heads over " + std::to_string(w.kv_heads) + " KV heads");
    require(rope.dim() == w.head_dim, "rope turns " + std::to_string(rope.dim()) + " of " + std::to_string(w.head_dim));
    check_linear("q_proj", w.q.weight, w.heads * w.head_dim, hidden);
    check_linear("k_proj", w.k.weight, w.kv_heads * w.head_dim, hidden);
    check_linear("v_proj", w.v.weight, w.kv_heads * w.head_dim, hidden);
    check_linear("o_proj", w.o.weight, hidden, w.heads * w.head_dim);
}

void check(const LatentWeights& w, std::int64_t hidden, const Rope& rope) {
    require(w.heads > 0 && w.rank > 0 && w.nope > 0 && w.v_dim > 0, "latent attention has positive sizes");
    require(rope.dim() == w.rope, "rope turns " + std::to_string(rope.dim()) + " of " + std::to_string(w.rope));
    if (w.q_a) check_linear("q_a_proj", w.q_a.weight, w.q_a.weight.rows, hidden);
    require(static_cast<bool>(w.q_a) == static_cast<bool>(w.q_norm), "q_a_proj comes with its norm");
    check_linear(w.q_a ? "q_b_proj" : "q_proj", w.q_b.weight, w.heads * (w.nope + w.rope), w.q_a ? w.q_a.weight.rows : hidden);
    check_linear("kv_a_proj_with_mqa", w.kv_a.weight, w.rank + w.rope, hidden);
    require(static_cast<bool>(w.kv_norm), "kv_a_layernorm is missing");
    require(std::ssize(w.absorb) == w.heads && std::ssize(w.values) == w.heads, "kv_b_proj is missing");
    check_linear("o_proj", w.o.weight, hidden, w.heads * w.v_dim);
}

}  // namespace

void LatentWeights::expand(const Matrix& kv_b, PackedStore& store) {
    const std::int64_t head = nope + v_dim;
    if (kv_b.rows != heads * head || kv_b.cols != rank)
        throw Error(Code::kConfig, "weight of kv_b_proj must be " + std::to_string(heads * head) + " x " + std::to_string(rank) +
                                       ", is " + std::to_string(kv_b.rows) + " x " + std::to_string(kv_b.cols));
    for (std::int64_t h = 0; h < heads; ++h) absorb.push_back(store.keep(kv_b.slice(h * head, nope)));
    for (std::int64_t h = 0; h < heads; ++h) values.push_back(store.pack(kv_b.slice(h * head + nope, v_dim)));
}

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
