// The kernels, written once in GCC/Clang vector extensions and compiled once an instruction set: kernels_portable.cpp
// with the baseline's, kernels_avx2.cpp with AVX2 and FMA. Everything here has internal linkage and no standard library
// templates are used, so that no function compiled for AVX2 can stand in for a portable one at link time.
//
// Shape of a sum: two accumulators of 8 lanes take 16 columns in turn, one more 8 columns go to the first, lanes are
// added in a fixed tree, left-over columns last, one by one. It depends on `cols` and the weights' type only.

namespace {

using poolweave::decode::Dtype;
using poolweave::decode::Matrix;

using F8 = float __attribute__((vector_size(32)));
using F4 = float __attribute__((vector_size(16)));
using F2 = float __attribute__((vector_size(8)));
using I8 = std::int32_t __attribute__((vector_size(32)));
using H8 = std::uint16_t __attribute__((vector_size(16)));
using H16 = std::uint16_t __attribute__((vector_size(32)));
using Q4 = std::uint64_t __attribute__((vector_size(32)));

#define INLINE inline __attribute__((always_inline))

INLINE F8 load8(const float* p) {
    F8 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

// bf16 is the upper half of a float: it widens by interleaving with zeros. AVX2 does that within each 16-byte lane, so
// the 16 numbers of a pair come out as (0-3, 8-11) and (4-7, 12-15), and what they meet is brought into that order:
// one instruction for 8 weights, where an ordered widening takes three.
INLINE F8 load8(const std::uint16_t* p) {
    H8 half;
    __builtin_memcpy(&half, p, sizeof half);
    const H8 low = __builtin_shufflevector(H8{}, half, 0, 8, 1, 9, 2, 10, 3, 11);
    const H8 high = __builtin_shufflevector(H8{}, half, 4, 12, 5, 13, 6, 14, 7, 15);
    F8 v;
    __builtin_memcpy(&v, &low, sizeof low);
    __builtin_memcpy(reinterpret_cast<char*>(&v) + sizeof low, &high, sizeof high);
    return v;
}

struct Pair {
    F8 first, second;
};

INLINE Pair load16(const float* p) { return {load8(p), load8(p + 8)}; }

#if defined(__AVX2__)
INLINE Pair load16(const std::uint16_t* p) {
    H16 raw;
    __builtin_memcpy(&raw, p, sizeof raw);
    const H16 zero = {};
    const H16 low = __builtin_shufflevector(zero, raw, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
    const H16 high = __builtin_shufflevector(zero, raw, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    Pair v;
    __builtin_memcpy(&v.first, &low, sizeof low);
    __builtin_memcpy(&v.second, &high, sizeof high);
    return v;
}

INLINE Pair reorder(Pair v) {  // its own inverse
    return {__builtin_shufflevector(v.first, v.second, 0, 1, 2, 3, 8, 9, 10, 11),
            __builtin_shufflevector(v.first, v.second, 4, 5, 6, 7, 12, 13, 14, 15)};
}
#else
INLINE Pair load16(const std::uint16_t* p) { return {load8(p), load8(p + 8)}; }

INLINE Pair reorder(Pair v) { return v; }
#endif

// 16 floats in the order in which weights of type W come out of `load16`, and back.
template <class W>
INLINE Pair load16_as(const float* p) {
    const Pair v = load16(p);
    return sizeof(W) == sizeof(float) ? v : reorder(v);
}

INLINE float load1(const float* p) { return *p; }

INLINE float load1(const std::uint16_t* p) {
    const std::uint32_t bits = static_cast<std::uint32_t>(*p) << 16;
    float v;
    __builtin_memcpy(&v, &bits, sizeof v);
    return v;
}

INLINE void store8(float* p, F8 v) { __builtin_memcpy(p, &v, sizeof v); }

template <class W>
INLINE void store16_from(float* p, Pair v) {
    const Pair ordered = sizeof(W) == sizeof(float) ? v : reorder(v);
    store8(p, ordered.first);
    store8(p + 8, ordered.second);
}

INLINE F8 splat(float x) { return F8{x, x, x, x, x, x, x, x}; }

INLINE float add_lanes(F8 v) {
    const F4 four = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    const F2 two = __builtin_shufflevector(four, four, 0, 1) + __builtin_shufflevector(four, four, 2, 3);
    return two[0] + two[1];
}

// One scalar step of a sum, fused where vectors are: else the compiler may fuse some steps of a loop and not others.
INLINE float step(float a, float b, float sum) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, sum);
#else
    return a * b + sum;
#endif
}

INLINE F8 max8(F8 a, F8 b) { return a > b ? a : b; }

// e^x to about 2 ulp for x in [-87, 88], clamped outside: Cody-Waite reduction and a polynomial (Cephes).
INLINE F8 exp8(F8 x) {
    x = max8(x, splat(-87.0F));
    x = x < splat(88.0F) ? x : splat(88.0F);
    const F8 round = splat(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
    const F8 n = (x * splat(1.44269504088896341F) + round) - round;
    const F8 r = (x - n * splat(0.693359375F)) - n * splat(-2.12194440e-4F);
    F8 p = splat(1.9875691500e-4F);
    p = p * r + splat(1.3981999507e-3F);
    p = p * r + splat(8.3334519073e-3F);
    p = p * r + splat(4.1665795894e-2F);
    p = p * r + splat(1.6666665459e-1F);
    p = p * r + splat(5.0000001201e-1F);
    p = p * (r * r) + r + splat(1.0F);
    const I8 power = (__builtin_convertvector(n, I8) + 127) << 23;
    F8 scale;
    __builtin_memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// R rows of w against B rows of x. Both are compile-time, so that all R * B sums live in registers.
template <class W, int B, int R>
INLINE void dot_tile(const W* w, std::int64_t w_stride, std::int64_t cols, const float* x, std::int64_t x_stride, float* y,
                     std::int64_t y_stride) {
    F8 even[R][B] = {}, odd[R][B] = {};
    std::int64_t c = 0;
    for (; c + 16 <= cols; c += 16) {
        for (int r = 0; r < R; ++r) {
            const Pair weights = load16(w + r * w_stride + c);
            // Rows are too short for the hardware to follow four of them: ask for what lies 12 KiB on.
            __builtin_prefetch(reinterpret_cast<const char*>(w + r * w_stride + c) + 12288);
            for (int b = 0; b < B; ++b) {
                const Pair values = load16_as<W>(x + b * x_stride + c);
                even[r][b] += weights.first * values.first;
                odd[r][b] += weights.second * values.second;
            }
        }
    }
    for (; c + 8 <= cols; c += 8) {
        for (int r = 0; r < R; ++r) {
            const F8 w0 = load8(w + r * w_stride + c);
            for (int b = 0; b < B; ++b) even[r][b] += w0 * load8(x + b * x_stride + c);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int b = 0; b < B; ++b) {
            float sum = add_lanes(even[r][b] + odd[r][b]);
            for (std::int64_t t = c; t < cols; ++t) sum = step(load1(w + r * w_stride + t), x[b * x_stride + t], sum);
            y[b * y_stride + r] = sum;
        }
    }
}

template <class W, int B, int R>
INLINE void dot_rows(const Matrix& m, const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride) {
    const W* w = static_cast<const W*>(m.data);
    std::int64_t r = 0;
    for (; r + R <= m.rows; r += R) dot_tile<W, B, R>(w + r * m.stride, m.stride, m.cols, x, x_stride, y + r, y_stride);
    for (; r < m.rows; ++r) dot_tile<W, B, 1>(w + r * m.stride, m.stride, m.cols, x, x_stride, y + r, y_stride);
}

template <class W>
INLINE void dot_batch(const Matrix& m, const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride) {
    for (; batch >= 4; batch -= 4, x += 4 * x_stride, y += 4 * y_stride) dot_rows<W, 4, 1>(m, x, x_stride, y, y_stride);
    switch (batch) {
        case 3: return dot_rows<W, 3, 1>(m, x, x_stride, y, y_stride);
        case 2: return dot_rows<W, 2, 2>(m, x, x_stride, y, y_stride);
        case 1: return dot_rows<W, 1, 4>(m, x, x_stride, y, y_stride);
        default: return;
    }
}

void dot(const Matrix& m, const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride) {
    if (m.dtype == Dtype::kF32) return dot_batch<float>(m, x, x_stride, batch, y, y_stride);
    dot_batch<std::uint16_t>(m, x, x_stride, batch, y, y_stride);
}

// B rows of p over N pairs of vectors of columns: y stays in registers while all rows of w go by.
template <class W, int B, int N>
INLINE void mix_tile(const W* w, std::int64_t w_stride, std::int64_t rows, const float* p, std::int64_t p_stride, float* y,
                     std::int64_t y_stride) {
    Pair sum[B][N];
    for (int b = 0; b < B; ++b)
        for (int n = 0; n < N; ++n) sum[b][n] = load16_as<W>(y + b * y_stride + 16 * n);
    for (std::int64_t r = 0; r < rows; ++r) {
        for (int n = 0; n < N; ++n) {
            const Pair v = load16(w + r * w_stride + 16 * n);
            for (int b = 0; b < B; ++b) {
                const F8 factor = splat(p[b * p_stride + r]);
                sum[b][n].first += factor * v.first;
                sum[b][n].second += factor * v.second;
            }
        }
    }
    for (int b = 0; b < B; ++b)
        for (int n = 0; n < N; ++n) store16_from<W>(y + b * y_stride + 16 * n, sum[b][n]);
}

template <class W, int B, int N>
INLINE void mix_cols(const Matrix& m, const float* p, std::int64_t p_stride, float* y, std::int64_t y_stride) {
    const W* w = static_cast<const W*>(m.data);
    std::int64_t c = 0;
    for (; c + 16 * N <= m.cols; c += 16 * N) mix_tile<W, B, N>(w + c, m.stride, m.rows, p, p_stride, y + c, y_stride);
    for (; c + 16 <= m.cols; c += 16) mix_tile<W, B, 1>(w + c, m.stride, m.rows, p, p_stride, y + c, y_stride);
    for (int b = 0; b < B; ++b) {
        std::int64_t rest = c;
        if (rest + 8 <= m.cols) {
            F8 sum = load8(y + b * y_stride + rest);
            for (std::int64_t r = 0; r < m.rows; ++r) sum += splat(p[b * p_stride + r]) * load8(w + r * m.stride + rest);
            store8(y + b * y_stride + rest, sum);
            rest += 8;
        }
        for (; rest < m.cols; ++rest) {
            float sum = y[b * y_stride + rest];
            for (std::int64_t r = 0; r < m.rows; ++r) sum = step(p[b * p_stride + r], load1(w + r * m.stride + rest), sum);
            y[b * y_stride + rest] = sum;
        }
    }
}

template <class W>
INLINE void mix_batch(const Matrix& m, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride) {
    for (; batch >= 4; batch -= 4, p += 4 * p_stride, y += 4 * y_stride) mix_cols<W, 4, 1>(m, p, p_stride, y, y_stride);
    switch (batch) {
        case 3: return mix_cols<W, 3, 1>(m, p, p_stride, y, y_stride);
        case 2: return mix_cols<W, 2, 2>(m, p, p_stride, y, y_stride);
        case 1: return mix_cols<W, 1, 4>(m, p, p_stride, y, y_stride);
        default: return;
    }
}

void mix(const Matrix& m, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride) {
    if (m.dtype == Dtype::kF32) return mix_batch<float>(m, p, p_stride, batch, y, y_stride);
    mix_batch<std::uint16_t>(m, p, p_stride, batch, y, y_stride);
}

float softmax(float* s, std::int64_t n, float scale) {
    float most = s[0] * scale;
    for (std::int64_t i = 1; i < n; ++i) {
        const float scaled = s[i] * scale;
        most = scaled > most ? scaled : most;
    }
    const F8 top = splat(most), factor = splat(scale);
    F8 sum = {};
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const F8 e = exp8(load8(s + i) * factor - top);
        store8(s + i, e);
        sum += e;
    }
    float total = add_lanes(sum);
    if (i < n) {
        float rest[8] = {};
        for (std::int64_t k = i; k < n; ++k) rest[k - i] = s[k];
        store8(rest, exp8(load8(rest) * factor - top));
        for (std::int64_t k = i; k < n; ++k) total += s[k] = rest[k - i];
    }
    return total;
}

INLINE F8 silu8(F8 gate, F8 up) { return gate / (splat(1.0F) + exp8(-gate)) * up; }

void silu_mul(float* gate, const float* up, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8) store8(gate + i, silu8(load8(gate + i), load8(up + i)));
    if (i < n) {
        float g[8] = {}, u[8] = {};
        for (std::int64_t k = i; k < n; ++k) g[k - i] = gate[k], u[k - i] = up[k];
        store8(g, silu8(load8(g), load8(u)));
        for (std::int64_t k = i; k < n; ++k) gate[k] = g[k - i];
    }
}

void rms_norm(const float* x, const float* weight, float eps, float* y, std::int64_t n) {
    F8 squares = {};
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const F8 v = load8(x + i);
        squares += v * v;
    }
    float sum = add_lanes(squares);
    for (; i < n; ++i) sum = step(x[i], x[i], sum);
    const float scale = 1.0F / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
    for (i = 0; i + 8 <= n; i += 8) store8(y + i, load8(x + i) * splat(scale) * load8(weight + i));
    for (; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

std::uint64_t read(const void* data, std::int64_t nbytes) {
    const char* p = static_cast<const char*>(data);
    Q4 sum[4] = {};
    for (std::int64_t i = 0; i + 128 <= nbytes; i += 128) {
        for (int k = 0; k < 4; ++k) {
            Q4 v;
            __builtin_memcpy(&v, p + i + 32 * k, sizeof v);
            sum[k] += v;
        }
    }
    const Q4 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    return all[0] + all[1] + all[2] + all[3];
}

}  // namespace
