// Every kernel table against sums in double, at odd sizes too; and the same bits whatever the batch.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/decode/kernels.hpp"
#include "core/decode/kv_view.hpp"
#include "core/decode/sampler.hpp"
#include "core/error.hpp"

using namespace poolweave::decode;

namespace {

std::mt19937 random_source(7);

std::vector<float> normal(std::size_t n) {
    std::normal_distribution<float> draw(0.0F, 1.0F);
    std::vector<float> values(n);
    for (float& value : values) value = draw(random_source);
    return values;
}

// A matrix in both element types: bf16 by cutting, so that the float copy holds the same numbers.
struct Both {
    std::vector<float> wide;
    std::vector<std::uint16_t> narrow;
    std::int64_t rows, cols, stride;

    Both(std::int64_t r, std::int64_t c, std::int64_t s) : wide(normal(r * s)), narrow(r * s), rows(r), cols(c), stride(s) {
        for (std::size_t i = 0; i < wide.size(); ++i) {
            narrow[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(wide[i]) >> 16);
            wide[i] = std::bit_cast<float>(static_cast<std::uint32_t>(narrow[i]) << 16);
        }
    }
    Matrix matrix(Dtype dtype) const {
        const void* data = dtype == Dtype::kF32 ? static_cast<const void*>(wide.data()) : narrow.data();
        return {data, rows, cols, stride, dtype};
    }
};

bool close(double got, double want, double scale) { return std::abs(got - want) <= 2e-6 * scale; }

void test_dot(const Kernels& kernels, std::int64_t rows, std::int64_t cols, Dtype dtype) {
    const Both w(rows, cols, cols + 3);
    const int batch = 9;
    const std::int64_t x_stride = cols + 5, y_stride = rows + 2;
    const auto x = normal(batch * x_stride);
    std::vector<float> all(batch * y_stride, -1.0F);
    kernels.dot(w.matrix(dtype), x.data(), x_stride, batch, all.data(), y_stride);
    for (int b = 0; b < batch; ++b) {
        for (std::int64_t r = 0; r < rows; ++r) {
            double want = 0.0, size = 1.0;
            for (std::int64_t c = 0; c < cols; ++c) {
                const double term = static_cast<double>(w.wide[r * w.stride + c]) * x[b * x_stride + c];
                want += term, size += std::abs(term);
            }
            CHECK(close(all[b * y_stride + r], want, size));
        }
        CHECK(all[b * y_stride + rows] == -1.0F);  // nothing written beyond
    }
    for (int first = 0; first < batch; ++first) {  // any batch, any row alone: the same bits
        for (int count = 1; first + count <= batch; ++count) {
            std::vector<float> some(count * y_stride, -1.0F);
            kernels.dot(w.matrix(dtype), x.data() + first * x_stride, x_stride, count, some.data(), y_stride);
            CHECK(std::memcmp(some.data(), all.data() + first * y_stride, some.size() * sizeof(float)) == 0);
        }
    }
    float alone = 0.0F;
    kernels.dot(w.matrix(dtype).slice(rows - 1, 1), x.data(), x_stride, 1, &alone, 1);
    CHECK(alone == all[rows - 1]);
}

void test_mix(const Kernels& kernels, std::int64_t rows, std::int64_t cols, Dtype dtype) {
    const Both w(rows, cols, cols + 3);
    const int batch = 7;
    const std::int64_t p_stride = rows + 1, y_stride = cols + 2;
    const auto p = normal(batch * p_stride);
    const auto start = normal(batch * y_stride);
    auto all = start;
    kernels.mix(w.matrix(dtype), p.data(), p_stride, batch, all.data(), y_stride);
    for (int b = 0; b < batch; ++b) {
        for (std::int64_t c = 0; c < cols; ++c) {
            double want = start[b * y_stride + c], size = 1.0 + std::abs(want);
            for (std::int64_t r = 0; r < rows; ++r) {
                const double term = static_cast<double>(p[b * p_stride + r]) * w.wide[r * w.stride + c];
                want += term, size += std::abs(term);
            }
            CHECK(close(all[b * y_stride + c], want, size));
        }
        CHECK(all[b * y_stride + cols] == start[b * y_stride + cols]);
    }
    for (int b = 0; b < batch; ++b) {
        for (int count = 1; b + count <= batch; ++count) {
            std::vector<float> some(start.begin() + b * y_stride, start.begin() + (b + count) * y_stride);
            kernels.mix(w.matrix(dtype), p.data() + b * p_stride, p_stride, count, some.data(), y_stride);
            CHECK(std::memcmp(some.data(), all.data() + b * y_stride, some.size() * sizeof(float)) == 0);
        }
    }
    auto halves = start;  // rows in two calls, as blocks of a sequence come: the same bits
    const std::int64_t cut = rows / 2;
    kernels.mix(w.matrix(dtype).slice(0, cut), p.data(), p_stride, batch, halves.data(), y_stride);
    kernels.mix(w.matrix(dtype).slice(cut, rows - cut), p.data() + cut, p_stride, batch, halves.data(), y_stride);
    CHECK(std::memcmp(halves.data(), all.data(), all.size() * sizeof(float)) == 0);
}

void test_softmax(const Kernels& kernels, std::int64_t n) {
    auto scores = normal(n);
    for (float& score : scores) score *= 30.0F;
    const auto raw = scores;
    const float scale = 0.7F, sum = kernels.softmax(scores.data(), n, scale);
    const double top = static_cast<double>(*std::max_element(raw.begin(), raw.end())) * scale;
    double want_sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
        const double want = std::exp(static_cast<double>(raw[i]) * scale - top);
        CHECK(std::abs(scores[i] - want) <= 4e-6 * want + 1e-30);
        want_sum += want;
    }
    CHECK(std::abs(sum - want_sum) <= 4e-6 * want_sum);
}

void test_pointwise(const Kernels& kernels, std::int64_t n) {
    auto gate = normal(n);
    const auto up = normal(n), x = normal(n), weight = normal(n);
    if (n > 2) gate[0] = -200.0F, gate[1] = 200.0F;  // beyond what e^x can hold
    const auto raw = gate;
    kernels.silu_mul(gate.data(), up.data(), n);
    for (std::int64_t i = 0; i < n; ++i) {
        const double want = raw[i] / (1.0 + std::exp(-static_cast<double>(raw[i]))) * up[i];
        CHECK(std::abs(gate[i] - want) <= 2e-6 * std::abs(want) + 1e-30);
    }
    double squares = 0.0;
    for (const float v : x) squares += static_cast<double>(v) * v;
    std::vector<float> y(n);
    kernels.rms_norm(x.data(), weight.data(), 1e-6F, y.data(), n);
    auto in_place = x;
    kernels.rms_norm(in_place.data(), weight.data(), 1e-6F, in_place.data(), n);
    for (std::int64_t i = 0; i < n; ++i) {
        const double want = x[i] / std::sqrt(squares / static_cast<double>(n) + 1e-6) * weight[i];
        CHECK(std::abs(y[i] - want) <= 2e-6 * std::abs(want) + 1e-9);
        CHECK(in_place[i] == y[i]);
    }
}

void test_table(const Kernels& kernels) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
        for (const std::int64_t cols : {1, 7, 8, 15, 16, 17, 24, 31, 64, 129}) {
            for (const std::int64_t rows : {1, 3, 4, 5, 16}) {
                test_dot(kernels, rows, cols, dtype);
                test_mix(kernels, rows, cols, dtype);
            }
        }
    }
    for (const std::int64_t n : {1, 2, 7, 8, 9, 16, 100}) {
        test_softmax(kernels, n);
        test_pointwise(kernels, n);
    }
}

void test_store_rounds_to_nearest_even() {
    std::vector<std::uint16_t> memory(2 * 4);
    KvView kv{reinterpret_cast<std::byte*>(memory.data()), 1, 1, 1, 2, 1, 4, 8, 8, 8, Dtype::kBf16};
    const float values[4] = {1.0F, std::bit_cast<float>(0x3f808000U), std::bit_cast<float>(0x3f818000U),
                             std::bit_cast<float>(0x7f800001U)};
    kv.store(0, 0, 0, 1, values);
    CHECK(memory[0] == 0);
    CHECK(memory[4] == 0x3f80 && memory[5] == 0x3f80 && memory[6] == 0x3f82);
    CHECK((memory[7] & 0x7f80) == 0x7f80 && (memory[7] & 0x7f) != 0);  // a NaN stays one
}

void test_sequences_are_checked() {
    std::vector<float> memory(64);
    const KvView kv{reinterpret_cast<std::byte*>(memory.data()), 2, 1, 1, 4, 1, 8, 32, 32, 32, Dtype::kF32};
    const std::vector<std::int32_t> good{1, 0}, bad{1, 2}, negative{-1, 0};
    const auto check = [&](std::int32_t position, const std::vector<std::int32_t>& slots) {
        const Sequence sequence{position, slots};
        check_sequences(kv, {&sequence, 1});
        return 0;
    };
    CHECK(check(7, good) == 0);
    CHECK(check(3, bad) == 0);  // the second block is not reached
    CHECK_THROWS(check(8, good), poolweave::Code::kConfig);
    CHECK_THROWS(check(4, bad), poolweave::Code::kConfig);
    CHECK_THROWS(check(0, negative), poolweave::Code::kConfig);
    CHECK_THROWS(check(-1, good), poolweave::Code::kConfig);
}

void test_sampler() {
    Sampler sampler;
    const std::vector<float> logits{1.0F, 3.0F, 3.0F, 0.0F};
    CHECK(sampler.next(logits, {}, 5) == 1);  // the lowest id among equals
    std::vector<int> counts(4);
    const Sampling warm{.temperature = 1.0F, .top_p = 1.0F, .seed = 3};
    for (int position = 0; position < 40000; ++position) ++counts[sampler.next(logits, warm, position)];
    double sum = 0.0;
    for (const float logit : logits) sum += std::exp(logit);
    for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(counts[i] / 40000.0 - std::exp(logits[i]) / sum) < 0.01);
    CHECK(sampler.next(logits, warm, 11) == sampler.next(logits, warm, 11));
    const Sampling nucleus{.temperature = 1.0F, .top_p = 0.8F, .seed = 3};
    for (int position = 0; position < 2000; ++position) {
        const int token = sampler.next(logits, nucleus, position);
        CHECK(token == 1 || token == 2);
    }
}

}  // namespace

int main() {
    test_table(portable_kernels());
    if (avx2_kernels() != nullptr) test_table(*avx2_kernels());
    CHECK(std::string(kernels_named("portable").name) == "portable");
    CHECK_THROWS(kernels_named("mmx"), poolweave::Code::kConfig);
    test_store_rounds_to_nearest_even();
    test_sequences_are_checked();
    test_sampler();
    return 0;
}
