// The decode executors as Python holds them: native stacks with the arrays they borrow from.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/weights.hpp"
#include "core/decode/attention_stack.hpp"
#include "core/decode/ffn.hpp"

namespace poolweave::bindings {

namespace nb = nanobind;

using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using InRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Int32s = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline void check_rows(std::size_t batch, std::int64_t cols, std::initializer_list<std::pair<std::size_t, std::size_t>> shapes) {
    for (const auto& [rows, width] : shapes)
        if (rows != batch || static_cast<std::int64_t>(width) != cols)
            throw Error(Code::kConfig, "an array is " + std::to_string(rows) + " x " + std::to_string(width) +
                                           ", the batch " + std::to_string(batch) + " x " + std::to_string(cols));
}

struct Store {
    std::shared_ptr<decode::PackedStore> store = std::make_shared<decode::PackedStore>();

    PackedWeight pack(const AnyArray& array) const {
        const decode::Matrix matrix = Weights::matrix(array, "a weight");
        nb::gil_scoped_release release;
        return {store, store->pack(matrix)};
    }
};

struct Ffn {
    decode::FfnStack stack;
    Weights weights;

    decode::DenseFfn dense(const Named& from, const char* gate, const char* up, const char* down) {
        return {weights.linear(from, gate), weights.linear(from, up), weights.linear(from, down)};
    }

    void add_dense(const Named& from) {
        stack.add({.dense = dense(from, "gate", "up", "down"), .moe = std::nullopt});
    }

    void add_moe(const Named& from, const Named& sizes) {
        decode::MoeFfn moe{.routing = {}, .router = weights.packed(from, "router"), .experts = {},
                           .shared = dense(from, "shared_gate", "shared_up", "shared_down"), .places = {}};
        decode::Routing& routing = moe.routing;
        routing.experts = number<int>(sizes, "experts");
        routing.top_k = number<int>(sizes, "top_k");
        routing.gate = number<bool>(sizes, "sigmoid") ? decode::Gate::kSigmoid : decode::Gate::kSoftmax;
        routing.normalise = number<bool>(sizes, "normalise");
        routing.scale = number<float>(sizes, "scale");
        routing.groups = number<int>(sizes, "groups");
        routing.top_groups = number<int>(sizes, "top_groups");
        routing.group_score = number<bool>(sizes, "sum_top_two") ? decode::GroupScore::kSumOfTopTwo : decode::GroupScore::kMax;
        routing.choice_bias = weights.vector(from, "choice_bias", routing.experts);
        moe.places = number<std::vector<std::int32_t>>(sizes, "places");
        const std::vector<decode::Packed> gate_up = weights.packed_list(from, "gate_up"), down = weights.packed_list(from, "experts_down");
        if (gate_up.size() != down.size())
            throw Error(Code::kConfig, std::to_string(gate_up.size()) + " experts' gate and up, " + std::to_string(down.size()) + " down");
        for (std::size_t e = 0; e < down.size(); ++e) moe.experts.push_back({gate_up[e], down[e]});
        stack.add({.dense = {}, .moe = moe});
    }

    void forward(std::int64_t layer, InRows x, Rows y) {
        check_rows(x.shape(0), stack.hidden(), {{x.shape(0), x.shape(1)}, {y.shape(0), y.shape(1)}});
        nb::gil_scoped_release release;
        stack.forward(layer, x.data(), static_cast<int>(x.shape(0)), y.data());
    }
};

// A pool's view, [slots, layers, parts, block_tokens, heads, dim]; any strides over the first three axes.
struct Kv {
    nb::ndarray<nb::ndim<6>, nb::device::cpu> array;
    decode::KvView view;

    explicit Kv(nb::ndarray<nb::ndim<6>, nb::device::cpu> from) : array(from) {
        const bool wide = from.dtype() == nb::dtype<float>();
        if (!wide && from.dtype() != nb::dtype<std::uint16_t>())
            throw Error(Code::kConfig, "KV is decoded in float32 or bfloat16 (a view of uint16)");
        const auto size = [&](std::size_t axis) { return static_cast<std::int64_t>(from.shape(axis)); };
        if (from.stride(5) != 1 || from.stride(4) != size(5) || from.stride(3) != size(4) * size(5))
            throw Error(Code::kConfig, "tokens, heads and dims of a KV view must be contiguous");
        view = {static_cast<std::byte*>(from.data()), size(0), size(1), size(2), size(3), size(4), size(5),
                from.stride(0), from.stride(1), from.stride(2), wide ? decode::Dtype::kF32 : decode::Dtype::kBf16};
    }
};

struct Attention {
    Weights weights;
    decode::AttentionStack stack;

    Attention(std::int64_t hidden, const Named& ends, std::vector<float> inv_freq, float rope_scale, int rope_form, const std::string& kernels)
        : stack(decode::kernels_named(kernels), hidden, ends_of(ends, hidden),
                decode::Rope(std::move(inv_freq), rope_scale, static_cast<decode::RopeForm>(rope_form))) {}

    // Tied ends are one packed weight, given twice.
    decode::Ends ends_of(const Named& from, std::int64_t hidden) {
        return {weights.packed(from, "embedding"), weights.norm(from, "norm", hidden), weights.packed(from, "head")};
    }

    void add(const Named& from, const decode::AttentionWeights& attention) {
        stack.add({weights.norm(from, "input_norm", stack.hidden()), weights.norm(from, "post_norm", stack.hidden()), attention});
    }

    void add_grouped(const Named& from, const Named& sizes) {
        const auto dim = number<std::int64_t>(sizes, "head_dim");
        add(from, decode::GroupedWeights{
                      .heads = number<std::int64_t>(sizes, "heads"), .kv_heads = number<std::int64_t>(sizes, "kv_heads"),
                      .head_dim = dim, .q = weights.linear(from, "q"), .k = weights.linear(from, "k"),
                      .v = weights.linear(from, "v"), .o = weights.linear(from, "o"),
                      .q_norm = weights.norm(from, "q_norm", dim), .k_norm = weights.norm(from, "k_norm", dim),
                      .scale = number<float>(sizes, "scale")});
    }

    void add_latent(const Named& from, const Named& sizes) {
        const auto rank = number<std::int64_t>(sizes, "rank");
        const decode::Linear q_a = weights.linear(from, "q_a");
        decode::LatentWeights latent{
                      .heads = number<std::int64_t>(sizes, "heads"), .rank = rank,
                      .nope = number<std::int64_t>(sizes, "nope"), .rope = number<std::int64_t>(sizes, "rope"),
                      .v_dim = number<std::int64_t>(sizes, "v_dim"), .q_a = q_a, .q_b = weights.linear(from, "q_b"),
                      .q_norm = weights.norm(from, "q_a_norm", q_a.weight.rows), .kv_a = weights.linear(from, "kv_a"),
                      .kv_norm = weights.norm(from, "kv_a_norm", rank), .absorb = {}, .values = {}, .o = {},
                      .scale = number<float>(sizes, "scale")};
        latent.expand(Weights::matrix(from, "expand"), weights.store());
        latent.o = weights.linear(from, "o");
        add(from, latent);
    }

    void embed(Int32s tokens, Rows residual) const {
        check_rows(tokens.size(), stack.hidden(), {{residual.shape(0), residual.shape(1)}});
        stack.embed({tokens.data(), tokens.size()}, residual.data());
    }

    void attend(std::int64_t layer, const Kv& kv, Int32s positions, Tables slots, std::optional<InRows> delta, Rows residual,
                Rows normed) {
        const std::size_t batch = positions.size();
        check_rows(batch, stack.hidden(), {{residual.shape(0), residual.shape(1)}, {normed.shape(0), normed.shape(1)}});
        check_rows(batch, static_cast<std::int64_t>(slots.shape(1)), {{slots.shape(0), slots.shape(1)}});
        if (delta) check_rows(batch, stack.hidden(), {{delta->shape(0), delta->shape(1)}});
        std::vector<decode::Sequence> sequences;
        for (std::size_t b = 0; b < batch; ++b)
            sequences.push_back({positions.data()[b], {slots.data() + b * slots.shape(1), slots.shape(1)}});
        nb::gil_scoped_release release;
        stack.attend(layer, kv.view, sequences, delta ? delta->data() : nullptr, residual.data(), normed.data());
    }

    void logits(std::optional<InRows> delta, Rows residual, Rows out) {
        const std::size_t batch = residual.shape(0);
        check_rows(batch, stack.hidden(), {{residual.shape(0), residual.shape(1)}});
        check_rows(batch, stack.vocab(), {{out.shape(0), out.shape(1)}});
        if (delta) check_rows(batch, stack.hidden(), {{delta->shape(0), delta->shape(1)}});
        nb::gil_scoped_release release;
        stack.logits(static_cast<int>(batch), delta ? delta->data() : nullptr, residual.data(), out.data());
    }
};

}  // namespace poolweave::bindings
