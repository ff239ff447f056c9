#include "core/decode/attention_stack.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/decode/linear.hpp"
#include "core/error.hpp"

namespace poolweave::decode {

namespace {

void add_to(float* target, const float* delta, std::int64_t n) {
    if (delta == nullptr) return;
    for (std::int64_t i = 0; i < n; ++i) target[i] += delta[i];
}

float widen(std::uint16_t bf16) {
    const std::uint32_t bits = static_cast<std::uint32_t>(bf16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace

AttentionStack::AttentionStack(const Kernels& kernels, const Ends& ends, Rope rope)
    : kernels_(kernels), ends_(ends), rope_(std::move(rope)) {
    check_linear("embedding", {ends.embedding, nullptr}, ends.embedding.rows, ends.embedding.cols);
    check_linear("lm_head", {ends.head, nullptr}, ends.embedding.rows, ends.embedding.cols);
    if (!ends.norm) throw Error(Code::kConfig, "the final norm is missing");
}

void AttentionStack::add(const AttentionLayer& layer) {
    if (!layer.input_norm || !layer.post_norm) throw Error(Code::kConfig, "a layer has an input norm and a post norm");
    check_attention(layer.weights, hidden(), rope_);
    layers_.push_back(layer);
}

void AttentionStack::embed(std::span<const std::int32_t> tokens, float* residual) const {
    const Matrix& m = ends_.embedding;
    for (std::size_t b = 0; b < tokens.size(); ++b) {
        if (tokens[b] < 0 || tokens[b] >= m.rows)
            throw Error(Code::kConfig,
                        "token " + std::to_string(tokens[b]) + " of a vocabulary of " + std::to_string(m.rows));
        float* out = residual + static_cast<std::int64_t>(b) * m.cols;
        const Matrix row = m.slice(tokens[b], 1);
        if (m.dtype == Dtype::kF32) {
            std::memcpy(out, row.data, static_cast<std::size_t>(m.cols) * sizeof(float));
        } else {
            for (std::int64_t c = 0; c < m.cols; ++c) out[c] = widen(static_cast<const std::uint16_t*>(row.data)[c]);
        }
    }
}

void AttentionStack::attend(std::int64_t layer, const KvView& kv, std::span<const Sequence> sequences, const float* delta,
                            float* residual, float* normed) {
    if (layer < 0 || layer >= layers() || layer >= kv.layers)
        throw Error(Code::kConfig, "attention layer " + std::to_string(layer) + " of " + std::to_string(layers()) +
                                       ", KV of " + std::to_string(kv.layers));
    const AttentionLayer& weights = layers_[layer];
    check_layout(weights.weights, kv);
    check_sequences(kv, sequences);
    const std::int64_t batch = static_cast<std::int64_t>(sequences.size()), n = hidden();
    if (angles_.size() < static_cast<std::size_t>(batch * rope_.dim())) angles_.resize(batch * rope_.dim());
    if (out_.size() < static_cast<std::size_t>(batch * n)) out_.resize(batch * n);
    add_to(residual, delta, batch * n);
    for (std::int64_t b = 0; b < batch; ++b) {
        std::copy_n(rope_.angles(sequences[b].position), rope_.dim(), angles_.data() + b * rope_.dim());
        kernels_.rms_norm(residual + b * n, weights.input_norm.weight, weights.input_norm.eps, normed + b * n, n);
    }
    const AttentionCall call{kernels_, rope_, kv, layer, sequences, angles_.data(), normed, n, out_.data()};
    poolweave::decode::attend(weights.weights, call, scratch_);
    add_to(residual, out_.data(), batch * n);
    for (std::int64_t b = 0; b < batch; ++b)
        kernels_.rms_norm(residual + b * n, weights.post_norm.weight, weights.post_norm.eps, normed + b * n, n);
}

void AttentionStack::logits(int batch, const float* delta, float* residual, float* logits) {
    const std::int64_t n = hidden();
    if (normed_.size() < static_cast<std::size_t>(batch * n)) normed_.resize(batch * n);
    add_to(residual, delta, batch * n);
    for (int b = 0; b < batch; ++b)
        kernels_.rms_norm(residual + b * n, ends_.norm.weight, ends_.norm.eps, normed_.data() + b * n, n);
    kernels_.dot(ends_.head, normed_.data(), n, batch, logits, vocab());
}

}  // namespace poolweave::decode
