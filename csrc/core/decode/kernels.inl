// The kernels, written once in GCC/Clang vector extensions and compiled once an instruction set: kernels_portable.cpp
// with the baseline's, kernels_avx2.cpp with AVX2 and FMA, kernels_avx512.cpp with AVX-512. Everything here has internal
// linkage and no standard library templates are used, so that no function compiled for one can stand in for another's at
// link time.
//
// Shape of a sum over packed weights: 8 lanes run over the columns, two times 8 lanes over bfloat16; with AVX-512 twice as
// many, every other step of a tile into each half of them. Over KV: as many lanes as a vector has. Lanes are added in a
// fixed tree. It depends on the number of columns and the type only, never on how many rows or batch entries a call carries.

#include "core/decode/lanes.inl"

namespace {

using poolweave::decode::Dtype;
using poolweave::decode::kTileRows;
using poolweave::decode::Packed;

constexpr bool kWide = kLanes == 16;
constexpr int kRowsEach = kLanes / 8;  // rows of a packed step in one vector
constexpr int kSets = kRowsEach;       // sums that steps take turns with: one chain of sums would wait for itself

// Sums of R rows of a tile against B rows of x.
template <int R, int B>
struct Sums {
    static constexpr int kVectors = R / kRowsEach;
    F first[kVectors][B] = {}, second[kVectors][B] = {};  // the second for bfloat16 alone
};

INLINE constexpr std::int64_t columns(const float*) { return 8; }
INLINE constexpr std::int64_t columns(const std::uint16_t*) { return 16; }

// One step of a tile: 32 bytes of each of R rows from `w` on.
template <int R, int B>
INLINE void take_step(Sums<R, B>& sums, const float* w, const float* x, std::int64_t x_stride) {
    F values[B];
    for (int b = 0; b < B; ++b) values[b] = both_halves(x + b * x_stride);
    for (int v = 0; v < Sums<R, B>::kVectors; ++v) {
        const F weights = load(w + v * kLanes);
        for (int b = 0; b < B; ++b) sums.first[v][b] += weights * values[b];
    }
}

template <int R, int B>
INLINE void take_step(Sums<R, B>& sums, const std::uint16_t* w, const float* x, std::int64_t x_stride) {
    F low[B], high[B];
    for (int b = 0; b < B; ++b) low[b] = both_halves(x + b * x_stride), high[b] = both_halves(x + b * x_stride + 8);
    for (int v = 0; v < Sums<R, B>::kVectors; ++v) {
        const Pair weights = load_pair_once(w + v * 2 * kLanes);
        for (int b = 0; b < B; ++b) {
            sums.first[v][b] += weights.first * low[b];
            sums.second[v][b] += weights.second * high[b];
        }
    }
}

template <int R, int B>
INLINE F total(const float*, const Sums<R, B>* sums, int v, int b) {
    F all = sums[0].first[v][b];
    for (int s = 1; s < kSets; ++s) all += sums[s].first[v][b];
    return all;
}

template <int R, int B>
INLINE F total(const std::uint16_t*, const Sums<R, B>* sums, int v, int b) {
    F all = sums[0].first[v][b] + sums[0].second[v][b];
    for (int s = 1; s < kSets; ++s) all += sums[s].first[v][b] + sums[s].second[v][b];
    return all;
}

INLINE void store_some(float* y, F4 values, std::int64_t count) {
    if (count >= 4) __builtin_memcpy(y, &values, sizeof values);
    else for (std::int64_t i = 0; i < count; ++i) y[i] = values[i];
}

// Rows [first, first + R) of one tile against B rows of x, of which `tail` are the columns after the last whole step.
template <int R, int B, class W>
INLINE void multiply_tile(const Packed& m, const W* tile, std::int64_t first, const float* x, std::int64_t x_stride,
                          const float* tail, float* y, std::int64_t y_stride) {
    Sums<R, B> sums[kSets];
    constexpr std::int64_t width = columns(static_cast<const W*>(nullptr)), stride = kTileRows * width;
    const std::int64_t whole = m.cols / width * width;
    const W* w = tile + first % kTileRows * width;
    std::int64_t c = 0;
    for (; c + kSets * width <= whole; c += kSets * width)
        for (int s = 0; s < kSets; ++s, w += stride) take_step(sums[s], w, x + c + s * width, x_stride);
    if (c < whole) take_step(sums[0], w, x + c, x_stride), w += stride;
    if (whole < m.cols) take_step(sums[kSets - 1], w, tail, 16);
    const auto sum = [&](int r, int b) { return half(total(tile, sums, r / kRowsEach, b), r % kRowsEach); };
    const std::int64_t left = m.rows - first;
    if constexpr (R == 4) {
        for (int b = 0; b < B; ++b) store_some(y + b * y_stride + first, add_eight(sum(0, b), sum(1, b), sum(2, b), sum(3, b)), left);
    } else {
        static_assert(R == 2 && B == 2);
        const F4 all = add_eight(sum(0, 0), sum(1, 0), sum(0, 1), sum(1, 1));
        store_some(y + first, all, left < 2 ? left : 2);
        store_some(y + y_stride + first, F4{all[2], all[3], 0.0F, 0.0F}, left < 2 ? left : 2);
    }
}

// B rows of x; B is what the registers hold the sums of.
template <int B>
INLINE void multiply_rows(const Packed& m, const float* tile, std::int64_t first, const float* x, std::int64_t x_stride,
                          const float* tail, float* y, std::int64_t y_stride) {
    multiply_tile<4, B>(m, tile, first, x, x_stride, tail, y, y_stride);
}

template <int B>
INLINE void multiply_rows(const Packed& m, const std::uint16_t* tile, std::int64_t first, const float* x,
                          std::int64_t x_stride, const float* tail, float* y, std::int64_t y_stride) {
    if constexpr (B == 1 || kWide) {
        multiply_tile<4, B>(m, tile, first, x, x_stride, tail, y, y_stride);
    } else {
        multiply_tile<2, 2>(m, tile, first, x, x_stride, tail, y, y_stride);
        if (first + 2 < m.rows) multiply_tile<2, 2>(m, tile, first + 2, x, x_stride, tail, y, y_stride);
    }
}

constexpr int kTogether = 8;  // rows of x that pass over a tile while it is near

template <class W>
INLINE void multiply_some(const Packed& m, const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride) {
    float tail[kTogether][16] = {};
    const std::int64_t whole = m.cols / columns(static_cast<const W*>(nullptr)) * columns(static_cast<const W*>(nullptr));
    for (int b = 0; b < batch; ++b)
        for (std::int64_t c = whole; c < m.cols; ++c) tail[b][c - whole] = x[b * x_stride + c];
    const std::int64_t tile_bytes = m.tile_bytes();
    const std::byte* at = m.data;
    for (std::int64_t first = 0; first < m.rows; first += kTileRows, at += tile_bytes) {
        const W* tile = reinterpret_cast<const W*>(at);
        int b = 0;
        for (; b + 2 <= batch; b += 2) multiply_rows<2>(m, tile, first, x + b * x_stride, x_stride, tail[b], y + b * y_stride, y_stride);
        if (b < batch) multiply_rows<1>(m, tile, first, x + b * x_stride, x_stride, tail[b], y + b * y_stride, y_stride);
    }
}

void multiply(const Packed& m, const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride) {
    for (int b = 0; b < batch; b += kTogether) {
        const int count = batch - b < kTogether ? batch - b : kTogether;
        if (m.dtype == Dtype::kF32) multiply_some<float>(m, x + b * x_stride, x_stride, count, y + b * y_stride, y_stride);
        else multiply_some<std::uint16_t>(m, x + b * x_stride, x_stride, count, y + b * y_stride, y_stride);
    }
}

}  // namespace

#include "core/decode/kv_kernels.inl"
#if defined(__AVX512F__)
#include "core/decode/kv_lanes.inl"
#endif
#if defined(__AVX512BF16__)
#include "core/decode/kv_pairs.inl"
#endif

namespace {

void arrange(const float* x, std::int64_t x_stride, int batch, std::int64_t cols, Dtype dtype, float* out) {
#if defined(__AVX512F__)
    if (dtype == Dtype::kF32) return arrange_words<float>(x, x_stride, batch, cols, out);
#else
    if (dtype == Dtype::kF32) return arrange_rows<float>(x, x_stride, batch, cols, out);
#endif
#if defined(__AVX512BF16__)
    arrange_words<std::uint16_t>(x, x_stride, batch, cols, out);
#else
    arrange_rows<std::uint16_t>(x, x_stride, batch, cols, out);
#endif
}

void dot(const KvRows& m, const float* x, int batch, float* y, std::int64_t y_stride) {
#if defined(__AVX512F__)
    if (m.dtype == Dtype::kF32) return dot_lanes<float>(m, x, batch, y, y_stride);
#else
    if (m.dtype == Dtype::kF32) return dot_batch<float>(m, x, m.cols, batch, y, y_stride);
#endif
#if defined(__AVX512BF16__)
    dot_lanes<std::uint16_t>(m, x, batch, y, y_stride);
#else
    dot_batch<std::uint16_t>(m, x, m.cols, batch, y, y_stride);
#endif
}

void mix(const KvRows& m, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride) {
#if defined(__AVX512BF16__)
    if (m.dtype == Dtype::kBf16 && !m.weights) return mix_pairs(m, p, p_stride, batch, y, y_stride);
#endif
    if (m.dtype == Dtype::kF32) mix_batch<float>(m, p, p_stride, batch, y, y_stride);
    else mix_batch<std::uint16_t>(m, p, p_stride, batch, y, y_stride);
}

float softmax(float* s, std::int64_t n, float scale) {
    const F factor = splat(scale);
    F peaks = splat(s[0] * scale);
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) peaks = larger(load(s + i) * factor, peaks);
    float most = peaks[0];
    for (int k = 1; k < kLanes; ++k) most = peaks[k] > most ? peaks[k] : most;
    for (; i < n; ++i) most = s[i] * scale > most ? s[i] * scale : most;
    const F top = splat(most);
    F sum = {};
    i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const F e = exp_lanes(load(s + i) * factor - top);
        store(s + i, e);
        sum += e;
    }
    float total = add_lanes(sum);
    if (i < n) {
        float rest[kLanes] = {};
        for (std::int64_t k = i; k < n; ++k) rest[k - i] = s[k];
        store(rest, exp_lanes(load(rest) * factor - top));
        for (std::int64_t k = i; k < n; ++k) total += s[k] = rest[k - i];
    }
    return total;
}

INLINE F silu(F gate, F up) { return gate / (splat(1.0F) + exp_lanes(-gate)) * up; }

void silu_mul(float* gate, const float* up, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(gate + i, silu(load(gate + i), load(up + i)));
    if (i < n) {
        float g[kLanes] = {}, u[kLanes] = {};
        for (std::int64_t k = i; k < n; ++k) g[k - i] = gate[k], u[k - i] = up[k];
        store(g, silu(load(g), load(u)));
        for (std::int64_t k = i; k < n; ++k) gate[k] = g[k - i];
    }
}

void rms_norm(const float* x, const float* weight, float eps, float* y, std::int64_t n) {
    F squares = {};
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const F v = load(x + i);
        squares += v * v;
    }
    float sum = add_lanes(squares);
    for (; i < n; ++i) sum = step(x[i], x[i], sum);
    const float scale = 1.0F / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
    for (i = 0; i + kLanes <= n; i += kLanes) store(y + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

std::uint64_t read(const void* data, std::int64_t nbytes) {
    constexpr std::int64_t vector = sizeof(Q);
    const char* p = static_cast<const char*>(data);
    Q sum[4] = {};
    for (std::int64_t i = 0; i + 4 * vector <= nbytes; i += 4 * vector) {
        for (int k = 0; k < 4; ++k) {
            Q v;
            __builtin_memcpy(&v, p + i + vector * k, sizeof v);
            sum[k] += v;
        }
    }
    const Q all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    std::uint64_t total = 0;
    for (int k = 0; k < kLanes / 2; ++k) total += all[k];
    return total;
}

float multiply_adds(std::int64_t count) {
    constexpr int chains = 12;  // more than the processor has under way, fewer than it has registers
    F sums[chains];
    for (F& sum : sums) sum = splat(1.0F);
    const F factor = kept(splat(0.5F)), term = kept(splat(0.25F));
    for (std::int64_t done = 0; done < count; done += chains * kLanes)
        for (F& sum : sums) sum = kept(sum * factor + term);
    float total = 0.0F;
    for (const F& sum : sums) total += sum[0];
    return total;
}

}  // namespace
