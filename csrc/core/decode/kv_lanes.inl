// Scores over KV with AVX-512: rows of x lie side by side in the lanes, so that no sum runs over many of them. H rows of x (the
// next power of two) leave C = 16 / H words of 32 bits of a row of KV to each: floats, or two numbers of bfloat16 where the
// processor multiplies pairs of them (AVX512_BF16). Part of kernels.inl.

#include <immintrin.h>

namespace {

// A step's products: words of one float, or of two numbers of bfloat16.
INLINE F add_words(const float*, F sum, Q a, Q b) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }

#if defined(__AVX512BF16__)
INLINE F add_words(const std::uint16_t*, F sum, Q a, Q b) { return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#endif

INLINE Q load_bytes(const void* p) {
    Q v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

INLINE __mmask32 first(std::int64_t count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

// C words of 32 bits, over and over.
template <int C>
INLINE Q repeated(const void* p) {
    if constexpr (C == 1) {
        std::int32_t word;
        __builtin_memcpy(&word, p, sizeof word);
        return (Q)_mm512_set1_epi32(word);
    } else if constexpr (C == 2) {
        long long words;
        __builtin_memcpy(&words, p, sizeof words);
        return (Q)_mm512_set1_epi64(words);
    } else if constexpr (C == 4) {
        return (Q)_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    } else if constexpr (C == 8) {
        return (Q)_mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    } else {
        return load_bytes(p);
    }
}

// The same of the `left` halves of words that there are, fewer than 2 C; zeros after them.
template <int C>
INLINE Q repeated(const void* p, std::int64_t left) {
    const __m512i words = _mm512_maskz_loadu_epi16(first(left), p);
    if constexpr (C == 1) return (Q)_mm512_broadcastd_epi32(_mm512_castsi512_si128(words));
    else if constexpr (C == 2) return (Q)_mm512_broadcastq_epi64(_mm512_castsi512_si128(words));
    else if constexpr (C == 4) return (Q)_mm512_broadcast_i32x4(_mm512_castsi512_si128(words));
    else if constexpr (C == 8) return (Q)_mm512_broadcast_i64x4(_mm512_castsi512_si256(words));
    else return (Q)words;
}

constexpr std::int64_t kInLanes = 16;  // rows of x that the lanes hold at most

// Numbers of one row of KV in a step, and steps of a row, when `lanes` rows of x lie side by side.
template <class W>
constexpr std::int64_t step_columns(std::int64_t lanes) { return 64 / lanes / static_cast<std::int64_t>(sizeof(W)); }

template <class W>
INLINE std::int64_t steps_of(std::int64_t cols, std::int64_t lanes) { return (cols - 1) / step_columns<W>(lanes) + 1; }

template <int C>
struct Words {};

INLINE int lanes_for(std::int64_t count) { return count > 8 ? 16 : count > 4 ? 8 : count > 2 ? 4 : count > 1 ? 2 : 1; }

// 64 bytes' columns of a row of x as KV of type W has them.
INLINE void take_columns(const float* x, std::int64_t there, float* out) {
    const F some = (F)_mm512_maskz_loadu_ps(static_cast<__mmask16>(first(there)), x);
    __builtin_memcpy(out, &some, sizeof some);
}

#if defined(__AVX512BF16__)
INLINE void take_columns(const float* x, std::int64_t there, std::uint16_t* out) {
    const std::uint32_t mask = first(there);
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 16);
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    __builtin_memcpy(out, &both, sizeof both);
}
#endif

// Up to 16 rows of x: a step's words, each row's next C words, row after row. Missing rows and columns are zeros.
template <class W, int C>
INLINE void arrange_lanes(const float* x, std::int64_t x_stride, std::int64_t count, std::int64_t cols, W* out) {
    constexpr std::int64_t line = step_columns<W>(1), columns = step_columns<W>(16 / C);
    for (std::int64_t b = 0; b < 16 / C; ++b, x += x_stride, out += columns) {
        W* to = out;
        for (std::int64_t c = 0; c < cols; c += line) {
            W taken[line];
            take_columns(b < count ? x + c : nullptr, b < count ? cols - c : 0, taken);  // of null nothing is read
            for (std::int64_t s = 0; s < line && c + s < cols; s += columns, to += line) __builtin_memcpy(to, taken + s, 4 * C);
        }
    }
}

// `run(C as a constant, first row of x, rows of x, where their words begin)` for up to 16 rows of x at a time.
template <class W, class Run>
INLINE void in_lanes(int batch, std::int64_t cols, Run run) {
    std::int64_t words = 0;
    for (int b = 0; b < batch; b += kInLanes) {
        const int count = batch - b < kInLanes ? batch - b : kInLanes, lanes = lanes_for(count);
        switch (lanes) {
            case 16: run(Words<1>{}, b, count, words); break;
            case 8: run(Words<2>{}, b, count, words); break;
            case 4: run(Words<4>{}, b, count, words); break;
            case 2: run(Words<8>{}, b, count, words); break;
            default: run(Words<16>{}, b, count, words); break;
        }
        words += steps_of<W>(cols, lanes) * 16;
    }
}

template <class W>
void arrange_words(const float* x, std::int64_t x_stride, int batch, std::int64_t cols, float* arranged) {
    in_lanes<W>(batch, cols, [&]<int C>(Words<C>, int b, int count, std::int64_t words) {
        arrange_lanes<W, C>(x + b * x_stride, x_stride, count, cols, reinterpret_cast<W*>(arranged + words));
    });
}

INLINE F even(F a, F b) { return (F)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88); }
INLINE F odd(F a, F b) { return (F)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd); }

template <int G>
INLINE F4 lane_group(F v) { return (F4)_mm512_extractf32x4_ps((__m512)v, G); }

// Where the scores of `rows` rows of KV go, for `count` rows of x.
struct Scores {
    float* y;
    std::int64_t y_stride, rows;
    int count;
};

// The sums of four rows of KV from `row` on, C lanes each: four numbers side by side for each row of x.
template <int C>
INLINE void store_scores(F a, F b, F c, F d, const Scores& out, int first) {
    F four[C < 4 ? 4 / C : 1];  // number k of lane group g: row of x  k + g * (4 / C)
    if constexpr (C == 1) {
        const F ab = even(a, b), cd = even(c, d), ab_odd = odd(a, b), cd_odd = odd(c, d);  // a0 a2 b0 b2 ...
        four[0] = even(ab, cd), four[2] = odd(ab, cd), four[1] = even(ab_odd, cd_odd), four[3] = odd(ab_odd, cd_odd);
    } else {
        const F ab = even(a, b) + odd(a, b), cd = even(c, d) + odd(c, d);
        if constexpr (C == 2) four[0] = even(ab, cd), four[1] = odd(ab, cd);
        else four[0] = even(ab, cd) + odd(ab, cd);
        if constexpr (C >= 8) four[0] += (F)_mm512_shuffle_f32x4((__m512)four[0], (__m512)four[0], 0xb1);
        if constexpr (C == 16) four[0] += (F)_mm512_shuffle_f32x4((__m512)four[0], (__m512)four[0], 0x4e);
    }
    constexpr int each = C < 4 ? 4 / C : 1, groups = C < 4 ? 1 : C / 4;  // rows of x a lane group; lane groups a row of x
    const bool whole = out.rows - first >= 4 && out.count == 16 / C;
    for (int k = 0; k < each; ++k) {
        const F4 lanes[4] = {lane_group<0>(four[k]), lane_group<1>(four[k]), lane_group<2>(four[k]), lane_group<3>(four[k])};
        for (int g = 0; g < 4; g += groups) {
            const int row = k + g / groups * each;
            float* y = out.y + row * out.y_stride + first;
            if (whole) __builtin_memcpy(y, &lanes[g], sizeof lanes[g]);
            else if (row < out.count) store_some(y, lanes[g], out.rows - first);
        }
    }
}

template <int R, class W>
INLINE void fetch_rows(const W* row, std::int64_t stride) {
    for (int r = 0; r < R; ++r, row += stride) {
        asm("" : "+r"(row));  // one register, not R of them
        __builtin_prefetch(row);
    }
}

// R rows from `first_row` on against what lies in the lanes of x; `next` are those that come R rows' time later, or null. Not
// inlined: the registers are just enough.
template <class W, int C, int R>
__attribute__((noinline)) void dot_lanes_tile(const W* first_row, const W* next, std::int64_t stride, std::int64_t cols,
                                              const float* x, const Scores& out) {
    constexpr std::int64_t line = step_columns<W>(1), columns = step_columns<W>(16 / C);
    const W* w[R / 4];  // four rows to a pointer: more pointers than registers would be loads beside the loads
#pragma GCC unroll 4
    for (int g = 0; g < R / 4; ++g, first_row += 4 * stride) {
        asm("" : "+r"(first_row));  // no vector of addresses
        w[g] = first_row;
    }
    F sum[R];
    std::int64_t c = 0;
#pragma GCC unroll 16  // all loops over rows: the sums stay in registers
    for (int r = 0; r < R; ++r) sum[r] = splat(0.0F);
#pragma GCC unroll 1  // but no more than one step: each row's address would be made anew
    for (; c + columns <= cols; c += columns, x += 16) {
        if (c % line == 0 && next != nullptr) fetch_rows<R>(next + c, stride);
        const Q values = load_bytes(x);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) sum[r] = add_words(first_row, sum[r], repeated<C>(w[r / 4] + r % 4 * stride + c), values);
    }
    if (c < cols) {
        const Q values = load_bytes(x);
        const std::int64_t halves = (cols - c) * static_cast<std::int64_t>(sizeof(W)) / 2;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            sum[r] = add_words(first_row, sum[r], repeated<C>(w[r / 4] + r % 4 * stride + c, halves), values);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r += 4) store_scores<C>(sum[r], sum[r + 1], sum[r + 2], sum[r + 3], out, r);
}

template <class W, int C>
INLINE void dot_lanes_blocks(const KvRows& m, bool fetching, const float* x, int count, float* y, std::int64_t y_stride) {
    for (std::int64_t from = 0, number = 0; from < m.rows; from += m.block_rows, ++number, y += m.block_rows) {
        const Block<W> block = block_of<W>(m, number);
        const W *w = block.data, *next = fetching ? block.next : nullptr;
        std::int64_t row = 0;
        const auto tile = [&](auto run, std::int64_t stride, std::int64_t rows) {
            run(w + row * m.stride, next == nullptr ? nullptr : next + row * m.stride, stride, m.cols, x,
                Scores{y + row, y_stride, rows, count});
            row += rows;
        };
        while (row + 16 <= block.rows) tile(dot_lanes_tile<W, C, 16>, m.stride, 16);
        while (row + 4 <= block.rows) tile(dot_lanes_tile<W, C, 4>, m.stride, 4);
        while (row < block.rows) tile(dot_lanes_tile<W, C, 4>, 0, 1);  // the same row four times
    }
}

template <class W>
void dot_lanes(const KvRows& m, const float* arranged, int batch, float* y, std::int64_t y_stride) {
    in_lanes<W>(batch, m.cols, [&]<int C>(Words<C>, int b, int count, std::int64_t words) {
        dot_lanes_blocks<W, C>(m, b == 0, arranged + words, count, y + b * y_stride, y_stride);
    });
}

}  // namespace
