#include "core/decode/ffn.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/decode/linear.hpp"
#include "core/error.hpp"

namespace poolweave::decode {

namespace {

void check_dense(const DenseFfn& ffn, std::int64_t hidden) {
    check_linear("gate", ffn.gate, ffn.gate.weight.rows, hidden);
    check_linear("up", ffn.up, ffn.gate.weight.rows, hidden);
    check_linear("down", ffn.down, hidden, ffn.gate.weight.rows);
}

void check_moe(const MoeFfn& moe, std::int64_t hidden) {
    moe.routing.validate();
    const std::int64_t experts = moe.routing.experts, inner = moe.down.cols;
    check_linear("router", {moe.router, nullptr}, experts, hidden);
    check_linear("experts' gate and up", {moe.gate_up, nullptr}, experts * 2 * inner, hidden);
    check_linear("experts' down", {moe.down, nullptr}, experts * hidden, inner);
    if (moe.shared) check_dense(moe.shared, hidden);
}

std::int64_t bytes_of(const Matrix& m) { return m.rows * m.cols * dtype_bytes(m.dtype); }

std::int64_t bytes_of(const DenseFfn& ffn) {
    return bytes_of(ffn.gate.weight) + bytes_of(ffn.up.weight) + bytes_of(ffn.down.weight);
}

void grow(std::vector<float>& scratch, std::size_t numbers) {
    if (scratch.size() < numbers) scratch.resize(numbers);
}

}  // namespace

void FfnStack::add(const FfnLayer& layer) {
    if (layer.moe) {
        check_moe(*layer.moe, hidden_);
        routers_.emplace_back(layer.moe->routing);
    } else {
        check_dense(layer.dense, hidden_);
        routers_.emplace_back(Routing{.experts = 1, .top_k = 1});
    }
    layers_.push_back(layer);
}

void FfnStack::forward(std::int64_t layer, const float* x, int batch, float* y) {
    if (layer < 0 || layer >= layers())
        throw Error(Code::kConfig, "FFN layer " + std::to_string(layer) + " of " + std::to_string(layers()));
    const FfnLayer& weights = layers_[layer];
    if (!weights.moe) return run_dense(weights.dense, x, batch, y);
    if (weights.moe->shared) {
        run_dense(weights.moe->shared, x, batch, y);
    } else {
        std::memset(y, 0, sizeof(float) * batch * hidden_);
    }
    const int experts = weights.moe->routing.experts, k = weights.moe->routing.top_k;
    grow(logits_, static_cast<std::size_t>(batch) * experts);
    choices_.resize(k);
    shares_.clear();
    kernels_.dot(weights.moe->router, x, hidden_, batch, logits_.data(), experts);
    for (int b = 0; b < batch; ++b) {
        routers_[layer].choose(logits_.data() + static_cast<std::int64_t>(b) * experts, choices_.data());
        for (const Choice& choice : choices_) shares_.push_back({choice.expert, b, choice.weight});
    }
    run_experts(*weights.moe, x, batch, y);
}

void FfnStack::run_dense(const DenseFfn& ffn, const float* x, int batch, float* y) {
    const std::int64_t width = ffn.gate.weight.rows;
    grow(inner_, static_cast<std::size_t>(2 * batch * width));
    float *gate = inner_.data(), *up = gate + batch * width;
    apply(kernels_, ffn.gate, x, hidden_, batch, gate, width);
    apply(kernels_, ffn.up, x, hidden_, batch, up, width);
    kernels_.silu_mul(gate, up, batch * width);
    apply(kernels_, ffn.down, gate, width, batch, y, hidden_);
}

void FfnStack::run_experts(const MoeFfn& moe, const float* x, int batch, float* y) {
    // By expert, so that each expert's weights are read once; a row still adds its experts in their own order.
    std::stable_sort(shares_.begin(), shares_.end(), [](const Share& a, const Share& b) { return a.expert < b.expert; });
    grow(gathered_, static_cast<std::size_t>(batch) * hidden_);
    grow(out_, static_cast<std::size_t>(batch) * hidden_);
    for (std::size_t first = 0; first < shares_.size();) {
        std::size_t last = first;
        while (last < shares_.size() && shares_[last].expert == shares_[first].expert) ++last;
        run_expert(moe, &shares_[first], static_cast<int>(last - first), x, y);
        first = last;
    }
}

void FfnStack::run_expert(const MoeFfn& moe, const Share* shares, int rows, const float* x, float* y) {
    const std::int64_t width = moe.down.cols, expert = shares[0].expert;
    for (int i = 0; i < rows; ++i)
        std::memcpy(gathered_.data() + i * hidden_, x + shares[i].row * hidden_, sizeof(float) * hidden_);
    grow(inner_, static_cast<std::size_t>(2 * rows * width));
    float* gate = inner_.data();  // [rows, 2 * width]: gate then up
    kernels_.dot(moe.gate_up.slice(expert * 2 * width, 2 * width), gathered_.data(), hidden_, rows, gate, 2 * width);
    for (int i = 0; i < rows; ++i) kernels_.silu_mul(gate + i * 2 * width, gate + i * 2 * width + width, width);
    kernels_.dot(moe.down.slice(expert * hidden_, hidden_), gate, 2 * width, rows, out_.data(), hidden_);
    for (int i = 0; i < rows; ++i) {
        float* target = y + shares[i].row * hidden_;
        const float* from = out_.data() + i * hidden_;
        for (std::int64_t h = 0; h < hidden_; ++h) target[h] += shares[i].weight * from[h];
    }
}

std::int64_t FfnStack::active_bytes(std::int64_t layer) const {
    const FfnLayer& weights = layers_.at(static_cast<std::size_t>(layer));
    if (!weights.moe) return bytes_of(weights.dense);
    const MoeFfn& moe = *weights.moe;
    const std::int64_t expert = (bytes_of(moe.gate_up) + bytes_of(moe.down)) / moe.routing.experts;
    return bytes_of(moe.router) + moe.routing.top_k * expert + (moe.shared ? bytes_of(moe.shared) : 0);
}

}  // namespace poolweave::decode
