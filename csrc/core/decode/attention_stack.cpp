#include "core/decode/attention_stack.hpp"

#include <algorithm>
#include <string>

#include "core/decode/linear.hpp"
#include "core/error.hpp"

namespace poolweave::decode {

namespace {

void add_to(float* target, const float* delta, std::int64_t n) {
    if (delta == nullptr) return;
    for (std::int64_t i = 0; i < n; ++i) target[i] += delta[i];
}

}  // namespace

AttentionStack::AttentionStack(const Kernels& kernels, std::int64_t hidden, const Ends& ends, Rope rope)
    : kernels_(kernels), hidden_(hidden), ends_(ends), rope_(std::move(rope)) {
    if (hidden < 1) throw Error(Code::kConfig, "a model is at least 1 wide, got " + std::to_string(hidden));
    if (!ends.embedding && !ends.head && !ends.norm) return;
    check_linear("embedding", ends.embedding, ends.embedding.rows, hidden);
    check_linear("lm_head", ends.head, ends.embedding.rows, hidden);
    if (!ends.norm) throw Error(Code::kConfig, "the final norm is missing");
}

void AttentionStack::add(const AttentionLayer& layer) {
    if (!layer.input_norm || !layer.post_norm) throw Error(Code::kConfig, "a layer has an input norm and a post norm");
    check_attention(layer.weights, hidden(), rope_);
    layers_.push_back(layer);
}

void AttentionStack::embed(std::span<const std::int32_t> tokens, float* residual) const {
    const Packed& m = ends_.embedding;
    for (std::size_t b = 0; b < tokens.size(); ++b) {
        if (tokens[b] < 0 || tokens[b] >= m.rows)
            throw Error(Code::kConfig,
                        "token " + std::to_string(tokens[b]) + " of a vocabulary of " + std::to_string(m.rows));
        m.read_row(tokens[b], residual + static_cast<std::int64_t>(b) * m.cols);
    }
}

void AttentionStack::attend(std::int64_t layer, const KvView& kv, std::span<const Sequence> sequences, const float* delta,
                            float* residual, float* normed) {
    const std::int64_t batch = static_cast<std::int64_t>(sequences.size()), n = hidden();
    sized(out_, batch * n);
    add_to(residual, delta, batch * n);
    part(layer, kv, sequences, residual, out_.data());
    add_to(residual, out_.data(), batch * n);
    close(layer, batch, residual, normed);
}

void AttentionStack::part(std::int64_t layer, const KvView& kv, std::span<const Sequence> sequences, const float* residual,
                          float* out) {
    if (layer < 0 || layer >= layers() || layer >= kv.layers)
        throw Error(Code::kConfig, "attention layer " + std::to_string(layer) + " of " + std::to_string(layers()) +
                                       ", KV of " + std::to_string(kv.layers));
    const AttentionLayer& weights = layers_[layer];
    check_layout(weights.weights, kv);
    check_sequences(kv, sequences);
    const std::int64_t batch = static_cast<std::int64_t>(sequences.size()), n = hidden();
    sized(angles_, batch * rope_.dim());
    sized(normed_, batch * n);
    for (std::int64_t b = 0; b < batch; ++b) {
        std::copy_n(rope_.angles(sequences[b].position), rope_.dim(), angles_.data() + b * rope_.dim());
        kernels_.rms_norm(residual + b * n, weights.input_norm.weight, weights.input_norm.eps, normed_.data() + b * n, n);
    }
    const AttentionCall call{kernels_, rope_, kv, layer, sequences, angles_.data(), normed_.data(), n, out};
    poolweave::decode::attend(weights.weights, call, scratch_);
}

void AttentionStack::close(std::int64_t layer, std::int64_t batch, const float* residual, float* normed) const {
    const RmsNorm& norm = layers_[layer].post_norm;
    for (std::int64_t b = 0; b < batch; ++b)
        kernels_.rms_norm(residual + b * hidden(), norm.weight, norm.eps, normed + b * hidden(), hidden());
}

void AttentionStack::logits(int batch, const float* delta, float* residual, float* logits) {
    const std::int64_t n = hidden();
    sized(normed_, batch * n);
    add_to(residual, delta, batch * n);
    for (int b = 0; b < batch; ++b)
        kernels_.rms_norm(residual + b * n, ends_.norm.weight, ends_.norm.eps, normed_.data() + b * n, n);
    kernels_.multiply(ends_.head, normed_.data(), n, batch, logits, vocab());
}

}  // namespace poolweave::decode
