// Mixing of values over bfloat16 KV for processors that multiply pairs of it (AVX512_BF16): twice the products a step, and
// nothing to widen. Two rows of KV make one word a column. Part of kernels.inl.

namespace {

constexpr std::int64_t kPairsNear = 256;  // pairs of rows whose weights are prepared at a time

// Word i holds numbers 2 i and 2 i + 1, the last one of an odd count beside a zero.
INLINE void pair_weights(const float* p, std::int64_t count, std::uint32_t* words) {
    for (std::int64_t i = 0; i < count; i += 16) {
        const std::uint32_t there = first(count - i);
        const __m512 numbers = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there), p + i);
        const __m512bh some = _mm512_cvtne2ps_pbh(_mm512_setzero_ps(), numbers);
        __builtin_memcpy(words + i / 2, &some, sizeof some / 2);
    }
}

// Two rows of 32 columns as words of a column: columns 0-3, 8-11, ... and 4-7, 12-15, ...; floats in that order and back.
INLINE Pair halves(F a, F b) {
    return {(F)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88), (F)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd)};
}

INLINE Pair wholes(Pair v) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    return {(F)_mm512_permutex2var_ps((__m512)v.first, low, (__m512)v.second),
            (F)_mm512_permutex2var_ps((__m512)v.first, high, (__m512)v.second)};
}

// All rows over N times 32 columns from `col` on, the last of which may be fewer, for B rows of p in words.
template <int B, int N>
INLINE void mix_pairs_tile(const KvRows& m, bool fetching, std::int64_t col, const std::uint32_t (*p)[kPairsNear + 8], float* y,
                           std::int64_t y_stride) {
    Pair sum[B][N];
    const auto there = [&](int n) { return first(m.cols - col - 32 * n); };
    const auto mask = [&](int n, int half) { return static_cast<__mmask16>(there(n) >> (16 * half)); };
    for (int b = 0; b < B; ++b) {
        for (int n = 0; n < N; ++n) {
            const float* from = y + b * y_stride + 32 * n;
            sum[b][n] = halves((F)_mm512_maskz_loadu_ps(mask(n, 0), from), (F)_mm512_maskz_loadu_ps(mask(n, 1), from + 16));
        }
    }
    std::int64_t word = 0;
    for (std::int64_t from = 0, number = 0; from < m.rows; from += m.block_rows, ++number) {
        const Block<std::uint16_t> block = block_of<std::uint16_t>(m, number);
        const std::uint16_t *w = block.data + col, *next = block.next == nullptr || !fetching ? nullptr : block.next + col;
        for (std::int64_t r = 0; r < block.rows; r += 2, w += 2 * m.stride, ++word) {
            const std::uint16_t* second = r + 1 < block.rows ? w + m.stride : w;
            for (int n = 0; n < N; ++n) {
                const __m512i a = _mm512_maskz_loadu_epi16(there(n), w + 32 * n);
                const __m512i b = _mm512_maskz_loadu_epi16(there(n), second + 32 * n);
                if (next != nullptr) {
                    __builtin_prefetch(next + r * m.stride + 32 * n);
                    __builtin_prefetch(next + (r + 1) * m.stride + 32 * n);
                }
                const Q low = (Q)_mm512_unpacklo_epi16(a, b), high = (Q)_mm512_unpackhi_epi16(a, b);
                for (int k = 0; k < B; ++k) {
                    const Q factors = (Q)_mm512_set1_epi32(static_cast<int>(p[k][word]));
                    sum[k][n].first = add_words(w, sum[k][n].first, low, factors);
                    sum[k][n].second = add_words(w, sum[k][n].second, high, factors);
                }
            }
        }
    }
    for (int b = 0; b < B; ++b) {
        for (int n = 0; n < N; ++n) {
            const Pair v = wholes(sum[b][n]);
            float* to = y + b * y_stride + 32 * n;
            _mm512_mask_storeu_ps(to, mask(n, 0), (__m512)v.first);
            _mm512_mask_storeu_ps(to + 16, mask(n, 1), (__m512)v.second);
        }
    }
}

template <int B>
INLINE void mix_pairs_cols(const KvRows& m, bool fetching, const float* p, std::int64_t p_stride, float* y,
                           std::int64_t y_stride) {
    std::uint32_t words[B][kPairsNear + 8];
    for (int b = 0; b < B; ++b) {
        std::uint32_t* to = words[b];
        const std::int64_t even = m.block_rows % 2 == 0 ? m.rows : m.block_rows;  // rows whose pairs lie one after the other
        for (std::int64_t from = 0; from < m.rows; from += even) {
            const std::int64_t count = m.rows - from < even ? m.rows - from : even;
            pair_weights(p + b * p_stride + from, count, to);
            to += (count + 1) / 2;
        }
    }
    std::int64_t c = 0;
    for (; c + 32 < m.cols; c += 64) mix_pairs_tile<B, 2>(m, fetching, c, words, y + c, y_stride);
    if (c < m.cols) mix_pairs_tile<B, 1>(m, fetching, c, words, y + c, y_stride);
}

INLINE void mix_pairs_near(const KvRows& m, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride) {
    bool fetching = true;
    for (; batch >= 4; batch -= 4, p += 4 * p_stride, y += 4 * y_stride, fetching = false)
        mix_pairs_cols<4>(m, fetching, p, p_stride, y, y_stride);
    switch (batch) {
        case 3: return mix_pairs_cols<3>(m, fetching, p, p_stride, y, y_stride);
        case 2: return mix_pairs_cols<2>(m, fetching, p, p_stride, y, y_stride);
        case 1: return mix_pairs_cols<1>(m, fetching, p, p_stride, y, y_stride);
        default: return;
    }
}

// Some blocks at a time, or some rows of a block that is longer.
void mix_pairs(const KvRows& m, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride) {
    KvRows some = m;
    const std::int64_t blocks = kPairsNear / ((m.block_rows + 1) / 2);
    for (std::int64_t from = 0; from < m.rows; from += some.rows) {
        const std::int64_t number = from / m.block_rows, within = from % m.block_rows;
        std::int64_t end = blocks > 0 ? from + blocks * m.block_rows : from + 2 * kPairsNear;
        if (blocks == 0 && end > (number + 1) * m.block_rows) end = (number + 1) * m.block_rows;
        const std::int64_t past = number + (blocks > 0 ? blocks : 1);  // the first block after these
        some.blocks = m.blocks + number;
        some.offset = m.offset + within * m.stride;
        some.rows = (end < m.rows ? end : m.rows) - from;
        some.block_rows = blocks > 0 ? m.block_rows : 2 * kPairsNear;
        some.next = past * m.block_rows < m.rows ? m.blocks[past] : m.next;
        mix_pairs_near(some, p + from, p_stride, batch, y, y_stride);
    }
}

}  // namespace
