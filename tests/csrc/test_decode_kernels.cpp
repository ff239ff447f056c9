// Every kernel table against sums in double, at odd sizes too; and the same bits whatever the batch.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/decode/kernels.hpp"
#include "core/decode/kv_view.hpp"
#include "core/decode/packed.hpp"
#include "core/decode/scratch.hpp"
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

// What a table that rounds takes numbers for.
float rounded(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return std::bit_cast<float>((bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U);
}

std::vector<float> taken(const std::vector<float>& values, bool rounds) {
    std::vector<float> out = values;
    if (rounds) std::transform(out.begin(), out.end(), out.begin(), rounded);
    return out;
}

using Product = std::function<void(const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride)>;

// `product` is that of `w` (its float copy) with rows of x: against sums in double, and the same in any batch, to the bit if
// `exact`.
void check_product(const Both& w, const Product& product, bool exact, bool rounds = false) {
    const std::int64_t rows = w.rows, cols = w.cols;
    const int batch = 9;
    const std::int64_t x_stride = cols + 5, y_stride = rows + 2;
    const auto x = normal(batch * x_stride), heard = taken(x, rounds);
    std::vector<float> all(batch * y_stride, -1.0F);
    product(x.data(), x_stride, batch, all.data(), y_stride);
    for (int b = 0; b < batch; ++b) {
        for (std::int64_t r = 0; r < rows; ++r) {
            double want = 0.0, size = 1.0;
            for (std::int64_t c = 0; c < cols; ++c) {
                const double term = static_cast<double>(w.wide[r * w.stride + c]) * heard[b * x_stride + c];
                want += term, size += std::abs(term);
            }
            CHECK(close(all[b * y_stride + r], want, size));
        }
        CHECK(all[b * y_stride + rows] == -1.0F);  // nothing written beyond
    }
    for (int first = 0; first < batch; ++first) {
        for (int count = 1; first + count <= batch; ++count) {
            std::vector<float> some(count * y_stride, -1.0F);
            product(x.data() + first * x_stride, x_stride, count, some.data(), y_stride);
            if (!exact)
                for (std::size_t i = 0; i < some.size(); ++i) CHECK(close(some[i], all[first * y_stride + i], 100.0));
            else CHECK(std::memcmp(some.data(), all.data() + first * y_stride, some.size() * sizeof(float)) == 0);
        }
    }
}

// A matrix as rows of KV in blocks of `block_rows`.
class Blocks {
  public:
    Blocks(const Both& w, Dtype dtype, std::int64_t block_rows, bool weights = false)
        : rows_{.block_rows = block_rows, .dtype = dtype, .weights = weights} {
        const Matrix m = w.matrix(dtype);
        rows_.rows = m.rows, rows_.cols = m.cols, rows_.stride = m.stride;
        for (std::int64_t first = 0; first < m.rows; first += block_rows) starts_.push_back(m.slice(first, 1).data);
    }
    KvRows rows(std::int64_t first_block = 0) const {
        KvRows rows = rows_;
        rows.blocks = starts_.data() + first_block;
        rows.rows -= first_block * rows.block_rows;
        return rows;
    }

  private:
    KvRows rows_;
    std::vector<const void*> starts_;
};

void test_dot(const Kernels& kernels, std::int64_t rows, std::int64_t cols, Dtype dtype) {
    const Both w(rows, cols, cols + 3), next(rows, cols, cols + 3);
    const Blocks whole(w, dtype, rows), fours(w, dtype, 4), ones(w, dtype, 1);
    KvRows m = whole.rows();
    const bool rounds = kernels.rounds && dtype == Dtype::kBf16;
    const auto arranged = [&](const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride) {
        Scratch copy;
        kernels.arrange(x, x_stride, batch, cols, dtype, sized(copy, arranged_size(batch, cols)));
        kernels.dot(m, copy.data(), batch, y, y_stride);
    };
    check_product(w, arranged, false, rounds);
    m.next = next.matrix(dtype).data;  // only fetched
    check_product(w, arranged, false, rounds);
    m = fours.rows();
    check_product(w, arranged, false, rounds);
    const auto x = normal(cols);
    std::vector<float> all(rows), single(rows);
    float alone = 0.0F;
    arranged(x.data(), cols, 1, all.data(), rows);
    m = ones.rows();
    arranged(x.data(), cols, 1, single.data(), rows);
    CHECK(single == all);
    m = ones.rows(rows - 1);
    arranged(x.data(), cols, 1, &alone, 1);
    CHECK(alone == all[rows - 1]);
}

void test_multiply(const Kernels& kernels, std::int64_t rows, std::int64_t cols, Dtype dtype) {
    const Both w(rows, cols, cols + 3);
    PackedStore store;
    const Packed packed = store.pack(w.matrix(dtype));
    check_product(w, [&](const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride) {
        kernels.multiply(packed, x, x_stride, batch, y, y_stride);
    }, true);
    std::vector<float> row(cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        packed.read_row(r, row.data());
        CHECK(std::memcmp(row.data(), w.wide.data() + r * w.stride, cols * sizeof(float)) == 0);
    }
    const Matrix from = w.matrix(dtype), kept = store.keep(from);
    CHECK(kept.rows == rows && kept.cols == cols && kept.stride == cols);
    for (std::int64_t r = 0; r < rows; ++r)
        CHECK(std::memcmp(kept.slice(r, 1).data, from.slice(r, 1).data, cols * dtype_bytes(dtype)) == 0);
}

void test_mix(const Kernels& kernels, std::int64_t rows, std::int64_t cols, Dtype dtype, bool weights = false) {
    const Both w(rows, cols, cols + 3);
    const int batch = 7;
    const std::int64_t p_stride = rows + 1, y_stride = cols + 2;
    const bool rounds = kernels.rounds && dtype == Dtype::kBf16 && !weights;
    const auto p = normal(batch * p_stride), heard = taken(p, rounds);
    const auto start = normal(batch * y_stride);
    auto all = start;
    const Blocks lying(w, dtype, rows, weights);
    const KvRows whole = lying.rows();
    kernels.mix(whole, p.data(), p_stride, batch, all.data(), y_stride);
    for (int b = 0; b < batch; ++b) {
        for (std::int64_t c = 0; c < cols; ++c) {
            double want = start[b * y_stride + c], size = 1.0 + std::abs(want);
            for (std::int64_t r = 0; r < rows; ++r) {
                const double term = static_cast<double>(heard[b * p_stride + r]) * w.wide[r * w.stride + c];
                want += term, size += std::abs(term);
            }
            CHECK(close(all[b * y_stride + c], want, size));
        }
        CHECK(all[b * y_stride + cols] == start[b * y_stride + cols]);
    }
    for (int b = 0; b < batch; ++b) {
        for (int count = 1; b + count <= batch; ++count) {
            std::vector<float> some(start.begin() + b * y_stride, start.begin() + (b + count) * y_stride);
            kernels.mix(whole, p.data() + b * p_stride, p_stride, count, some.data(), y_stride);
            CHECK(std::memcmp(some.data(), all.data() + b * y_stride, some.size() * sizeof(float)) == 0);
        }
    }
    const std::int64_t cut = rounds && rows > 1 ? (rows / 2 + 1) / 2 * 2 : (rows + 1) / 2;  // pairs stay together
    const Blocks ones(w, dtype, 1, weights), odd(w, dtype, 3, weights);
    for (const KvRows& blocks : {ones.rows(), odd.rows()}) {
        auto some = start;
        kernels.mix(blocks, p.data(), p_stride, batch, some.data(), y_stride);
        for (std::size_t i = 0; i < some.size(); ++i) CHECK(rounds ? close(some[i], all[i], 100.0) : some[i] == all[i]);
    }
    const Blocks halves(w, dtype, cut, weights);
    auto together = start;  // rows in blocks, in one call or in two, as the blocks of a sequence come: the same bits
    kernels.mix(halves.rows(), p.data(), p_stride, batch, together.data(), y_stride);
    CHECK(std::memcmp(together.data(), all.data(), all.size() * sizeof(float)) == 0);
    auto apart = start;
    KvRows first = halves.rows();
    first.rows = cut;
    kernels.mix(first, p.data(), p_stride, batch, apart.data(), y_stride);
    if (cut < rows) kernels.mix(halves.rows(1), p.data() + cut, p_stride, batch, apart.data(), y_stride);
    CHECK(std::memcmp(apart.data(), all.data(), all.size() * sizeof(float)) == 0);
}

void test_softmax(const Kernels& kernels, std::int64_t n) {
    auto scores = normal(n);
    for (float& score : scores) score *= 30.0F;
    const auto raw = scores;
    const float scale = 0.7F, sum = kernels.softmax(scores.data(), n, scale);
    const double top = static_cast<double>(*std::max_element(raw.begin(), raw.end())) * scale;
    double want_sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
        const double scaled = static_cast<double>(raw[i]) * scale, want = std::exp(scaled - top);
        const double rounded = 6e-8 * (std::abs(scaled) + 2.0 * std::abs(top));  // of the exponent: that of both and of their difference
        CHECK(std::abs(scores[i] - want) <= (2e-6 + rounded) * want + 1e-30);
        want_sum += want;
    }
    CHECK(std::abs(sum - want_sum) <= (2e-6 + 18e-8 * std::abs(top)) * want_sum);
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
    CHECK(kernels.multiply_adds(1) == 12 * 0.75F);      // one step of 12 sums: 1 / 2 + 1 / 4
    CHECK(kernels.multiply_adds(1 << 20) == 12 * 0.5F);  // their fixed point
    const std::vector<std::uint64_t> words(64, 3);
    CHECK(kernels.read(words.data(), 512) == 64 * 3);
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
        for (const std::int64_t cols : {1, 7, 8, 15, 16, 17, 24, 31, 33, 48, 64, 129}) {
            for (const std::int64_t rows : {1, 3, 4, 5, 16, 39}) {
                test_dot(kernels, rows, cols, dtype);
                test_multiply(kernels, rows, cols, dtype);
                test_mix(kernels, rows, cols, dtype);
                test_mix(kernels, rows, cols, dtype, true);
            }
        }
    }
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) test_mix(kernels, 1100, 40, dtype);  // a block longer than is prepared at once
    for (const std::int64_t n : {1, 2, 7, 8, 9, 16, 100}) {
        test_softmax(kernels, n);
        test_pointwise(kernels, n);
    }
}

// Weights lie one after the other, across the ends of the store's chunks too, and a store that could not grow says so.
void test_a_store_grows() {
    PackedStore store;
    const Both small(5, 40, 40);
    std::vector<Packed> kept;
    const std::int64_t rows = 40 << 10, cols = 256;  // 40 MiB
    const std::vector<float> large(rows * cols, 2.0F);
    for (int i = 0; i < 3; ++i) {
        kept.push_back(store.pack(small.matrix(Dtype::kF32)));
        kept.push_back(store.pack({large.data(), rows, cols, cols, Dtype::kF32}));
    }
    CHECK(kept[1].data == kept[0].data + kept[0].nbytes());
    std::vector<float> row(cols);
    for (std::size_t i = 0; i < kept.size(); i += 2) {
        kept[i].read_row(4, row.data());
        CHECK(std::memcmp(row.data(), small.wide.data() + 4 * 40, 40 * sizeof(float)) == 0);
        kept[i + 1].read_row(rows - 1, row.data());
        CHECK(row[cols - 1] == 2.0F);
    }
    CHECK(!store.pack(Matrix{}));
    CHECK(!store.keep(Matrix{}));
    CHECK_THROWS(store.pack({large.data(), std::int64_t{1} << 50, cols, cols, Dtype::kF32}), poolweave::Code::kOs);
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
    for (const Kernels* table : kernel_tables()) test_table(*table);
    CHECK(std::string(kernels_named("portable").name) == "portable");
    CHECK_THROWS(kernels_named("mmx"), poolweave::Code::kConfig);
    test_a_store_grows();
    test_store_rounds_to_nearest_even();
    test_sequences_are_checked();
    test_sampler();
    return 0;
}
