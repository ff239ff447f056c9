#include "core/decode/ffn.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "core/decode/linear.hpp"
#include "core/error.hpp"

namespace poolweave::decode {

namespace {

void check_dense(const DenseFfn& ffn, std::int64_t hidden) {
    check_linear("gate", ffn.gate.weight, ffn.gate.weight.rows, hidden);
    check_linear("up", ffn.up.weight, ffn.gate.weight.rows, hidden);
    check_linear("down", ffn.down.weight, hidden, ffn.gate.weight.rows);
}

void check_moe(const MoeFfn& moe, std::int64_t hidden) {
    moe.routing.validate();
    const std::int64_t experts = moe.routing.experts, here = std::ssize(moe.experts);
    const bool fits = moe.places.empty() ? here == experts : std::ssize(moe.places) == experts;
    if (!fits || std::any_of(moe.places.begin(), moe.places.end(), [&](std::int32_t p) { return p < -1 || p >= here; }))
        throw Error(Code::kConfig, "places of " + std::to_string(experts) + " experts do not fit the " + std::to_string(here) + " here");
    check_linear("router", moe.router, experts, hidden);
    for (const Expert& expert : moe.experts) {
        check_linear("an expert's gate and up", expert.gate_up, 2 * expert.down.cols, hidden);
        check_linear("an expert's down", expert.down, hidden, expert.down.cols);
    }
    if (moe.shared) check_dense(moe.shared, hidden);
}

std::int64_t bytes_of(const Packed& m) { return m.rows * m.cols * dtype_bytes(m.dtype); }

std::int64_t bytes_of(const DenseFfn& ffn) {
    return bytes_of(ffn.gate.weight) + bytes_of(ffn.up.weight) + bytes_of(ffn.down.weight);
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

void FfnStack::forward(std::int64_t layer, const float* x, int batch, float* y, bool onto) {
    if (layer < 0 || layer >= layers())
        throw Error(Code::kConfig, "FFN layer " + std::to_string(layer) + " of " + std::to_string(layers()));
    const FfnLayer& weights = layers_[layer];
    const DenseFfn& whole = weights.moe ? weights.moe->shared : weights.dense;
    if (whole && onto) add_dense(whole, x, batch, y);
    else if (whole) run_dense(whole, x, batch, y);
    else if (!onto) std::memset(y, 0, sizeof(float) * batch * hidden_);
    if (!weights.moe || weights.moe->experts.empty()) return;
    choose(*weights.moe, routers_[layer], x, batch);
    run_experts(*weights.moe, x, batch, y);
}

// Fills `shares_` with what the experts here have to do.
void FfnStack::choose(const MoeFfn& moe, Router& router, const float* x, int batch) {
    const int experts = moe.routing.experts;
    sized(logits_, static_cast<std::int64_t>(batch) * experts);
    choices_.resize(moe.routing.top_k);
    shares_.clear();
    kernels_.multiply(moe.router, x, hidden_, batch, logits_.data(), experts);
    for (int b = 0; b < batch; ++b) {
        router.choose(logits_.data() + static_cast<std::int64_t>(b) * experts, choices_.data());
        for (const Choice& choice : choices_) {
            const int place = moe.places.empty() ? choice.expert : moe.places[choice.expert];
            if (place >= 0) shares_.push_back({place, b, choice.weight});
        }
    }
}

void FfnStack::add_dense(const DenseFfn& ffn, const float* x, int batch, float* y) {
    sized(out_, batch * hidden_);
    run_dense(ffn, x, batch, out_.data());
    for (std::int64_t i = 0; i < batch * hidden_; ++i) y[i] += out_[i];
}

void FfnStack::run_dense(const DenseFfn& ffn, const float* x, int batch, float* y) {
    const std::int64_t width = ffn.gate.weight.rows;
    sized(inner_, 2 * batch * width);
    float *gate = inner_.data(), *up = gate + batch * width;
    apply(kernels_, ffn.gate, x, hidden_, batch, gate, width);
    apply(kernels_, ffn.up, x, hidden_, batch, up, width);
    kernels_.silu_mul(gate, up, batch * width);
    apply(kernels_, ffn.down, gate, width, batch, y, hidden_);
}

void FfnStack::run_experts(const MoeFfn& moe, const float* x, int batch, float* y) {
    // By expert, so that each expert's weights are read once; a row still adds its experts in their own order.
    std::stable_sort(shares_.begin(), shares_.end(), [](const Share& a, const Share& b) { return a.expert < b.expert; });
    sized(gathered_, batch * hidden_);
    sized(out_, batch * hidden_);
    for (std::size_t first = 0; first < shares_.size();) {
        std::size_t last = first;
        while (last < shares_.size() && shares_[last].expert == shares_[first].expert) ++last;
        run_expert(moe.experts[shares_[first].expert], &shares_[first], static_cast<int>(last - first), x, y);
        first = last;
    }
}

void FfnStack::run_expert(const Expert& expert, const Share* shares, int rows, const float* x, float* y) {
    const std::int64_t width = expert.down.cols;
    for (int i = 0; i < rows; ++i)
        std::memcpy(gathered_.data() + i * hidden_, x + shares[i].row * hidden_, sizeof(float) * hidden_);
    sized(inner_, 2 * rows * width);
    float* gate = inner_.data();  // [rows, 2 * width]: gate then up
    kernels_.multiply(expert.gate_up, gathered_.data(), hidden_, rows, gate, 2 * width);
    for (int i = 0; i < rows; ++i) kernels_.silu_mul(gate + i * 2 * width, gate + i * 2 * width + width, width);
    kernels_.multiply(expert.down, gate, 2 * width, rows, out_.data(), hidden_);
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
    const std::int64_t expert = moe.experts.empty() ? 0 : bytes_of(moe.experts[0].gate_up) + bytes_of(moe.experts[0].down);
    return bytes_of(moe.router) + moe.routing.top_k * expert + (moe.shared ? bytes_of(moe.shared) : 0);
}

}  // namespace poolweave::decode
