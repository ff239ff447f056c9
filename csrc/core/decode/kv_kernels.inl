// The kernels over rows of KV, which lie in blocks: scores, and the mixture of values. Part of kernels.inl.

namespace {

using poolweave::decode::KvRows;

template <class W>
INLINE void arrange_rows(const float* x, std::int64_t x_stride, int batch, std::int64_t cols, float* out) {
    for (int b = 0; b < batch; ++b, x += x_stride, out += cols) {
        std::int64_t c = 0;
        for (; c + 2 * kLanes <= cols; c += 2 * kLanes) {
            const Pair v = load_pair_as<W>(x + c);
            store(out + c, v.first);
            store(out + c + kLanes, v.second);
        }
        for (; c < cols; ++c) out[c] = x[c];
    }
}

// Asks for the cache lines of the same pair of columns in the row that comes `w.next` after this one.
template <class W>
INLINE void fetch(const W* next, std::int64_t c) {
    constexpr std::int64_t bytes = 2 * kLanes * sizeof(W), line = 64;
    if (bytes >= line || c * static_cast<std::int64_t>(sizeof(W)) % line == 0) __builtin_prefetch(next + c);
    if (bytes > line) __builtin_prefetch(next + c + kLanes);
}

// The last columns of a row, one by one.
template <class W>
__attribute__((noinline)) void add_rest(const W* w, std::int64_t cols, std::int64_t c, const float* x, std::int64_t x_stride,
                                        int batch, float* y, std::int64_t y_stride) {
    for (int b = 0; b < batch; ++b)
        for (std::int64_t t = c; t < cols; ++t) y[b * y_stride] = step(load1(w + t), x[b * x_stride + t], y[b * y_stride]);
}

// One block of rows, and the block after it, whose rows are fetched ahead; or null.
template <class W>
struct Block {
    const W *data, *next;
    std::int64_t rows;
};

template <class W>
INLINE Block<W> block_of(const KvRows& m, std::int64_t number) {
    const auto at = [&](std::int64_t i) { return static_cast<const W*>(m.blocks[i]) + m.offset; };
    const std::int64_t left = m.rows - number * m.block_rows;
    const bool last = left <= m.block_rows;
    const W* after = m.next == nullptr ? nullptr : static_cast<const W*>(m.next) + m.offset;
    return {at(number), last ? after : at(number + 1), last ? left : m.block_rows};
}

// R rows of a block, from `row` on, against B rows of x. Both are compile-time, so that all R * B sums live in registers.
template <class W, int B, int R>
INLINE void dot_tile(const KvRows& m, const Block<W>& block, std::int64_t row, const float* x, std::int64_t x_stride, float* y,
                     std::int64_t y_stride) {
    const W* w = block.data + row * m.stride;
    const W* next = block.next == nullptr ? nullptr : block.next + row * m.stride;
    F sum[R][B] = {};
    std::int64_t c = 0;
    for (; c + 2 * kLanes <= m.cols; c += 2 * kLanes) {
        Pair weights[R];
        for (int r = 0; r < R; ++r) {
            weights[r] = load_pair(w + r * m.stride + c);
            if (next != nullptr) fetch(next + r * m.stride, c);
        }
        for (int b = 0; b < B; ++b) {
            const F values = kept(load(x + b * x_stride + c));
            for (int r = 0; r < R; ++r) sum[r][b] += weights[r].first * values;
        }
        for (int b = 0; b < B; ++b) {
            const F values = kept(load(x + b * x_stride + c + kLanes));
            for (int r = 0; r < R; ++r) sum[r][b] += weights[r].second * values;
        }
    }
    for (; c + kLanes <= m.cols; c += kLanes) {
        for (int r = 0; r < R; ++r) {
            const F w0 = load(w + r * m.stride + c);
            for (int b = 0; b < B; ++b) sum[r][b] += w0 * load(x + b * x_stride + c);
        }
    }
    y += row;
    for (int b = 0; b < B; b += R == 2 ? 2 : 1) {
        if constexpr (R == 4) {
            const F4 four = add_lanes(sum[0][b], sum[1][b], sum[2][b], sum[3][b]);
            __builtin_memcpy(y + b * y_stride, &four, sizeof four);
        } else if constexpr (R == 2) {
            const int other = b + 1 < B ? b + 1 : b;
            const F4 four = add_lanes(sum[0][b], sum[1][b], sum[0][other], sum[1][other]);
            const F2 low = __builtin_shufflevector(four, four, 0, 1), high = __builtin_shufflevector(four, four, 2, 3);
            __builtin_memcpy(y + b * y_stride, &low, sizeof low);
            __builtin_memcpy(y + other * y_stride, &high, sizeof high);
        } else {
            y[b * y_stride] = add_lanes(sum[0][b]);
        }
    }
    if (c == m.cols) return;
    for (int r = 0; r < R; ++r) add_rest(w + r * m.stride, m.cols, c, x, x_stride, B, y + r, y_stride);
}

template <class W, int B, int R>
INLINE void dot_blocks(const KvRows& m, bool fetching, const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride) {
    for (std::int64_t first = 0, number = 0; first < m.rows; first += m.block_rows, ++number, y += m.block_rows) {
        Block<W> block = block_of<W>(m, number);
        if (!fetching) block.next = nullptr;
        std::int64_t row = 0;
        for (; row + R <= block.rows; row += R) dot_tile<W, B, R>(m, block, row, x, x_stride, y, y_stride);
        for (; row < block.rows; ++row) dot_tile<W, B, 1>(m, block, row, x, x_stride, y, y_stride);
    }
}

constexpr int kRowsNear = kWide ? 4 : 2;  // rows against four of x: as many sums as the registers hold

template <class W>
INLINE void dot_batch(const KvRows& m, const float* x, std::int64_t x_stride, int batch, float* y, std::int64_t y_stride) {
    bool fetching = true;  // once is enough
    for (; batch >= 4; batch -= 4, x += 4 * x_stride, y += 4 * y_stride, fetching = false)
        dot_blocks<W, 4, kRowsNear>(m, fetching, x, x_stride, y, y_stride);
    switch (batch) {
        case 3: return dot_blocks<W, 3, kRowsNear>(m, fetching, x, x_stride, y, y_stride);
        case 2: return dot_blocks<W, 2, 4>(m, fetching, x, x_stride, y, y_stride);
        case 1: return dot_blocks<W, 1, 4>(m, fetching, x, x_stride, y, y_stride);
        default: return;
    }
}

// B rows of p over N pairs of vectors of columns: y stays in registers while all rows of w go by.
template <class W, int B, int N>
INLINE void mix_tile(const KvRows& m, bool fetching, std::int64_t col, const float* p, std::int64_t p_stride, float* y,
                     std::int64_t y_stride) {
    Pair sum[B][N];
    for (int b = 0; b < B; ++b)
        for (int n = 0; n < N; ++n) sum[b][n] = load_pair_as<W>(y + b * y_stride + 2 * kLanes * n);
    for (std::int64_t first = 0, number = 0; first < m.rows; first += m.block_rows, ++number) {
        const Block<W> block = block_of<W>(m, number);
        const W *w = block.data + col, *next = block.next == nullptr || !fetching ? nullptr : block.next + col;
        for (std::int64_t r = 0; r < block.rows; ++r) {
            for (int n = 0; n < N; ++n) {
                const Pair v = load_pair(w + r * m.stride + 2 * kLanes * n);
                if (next != nullptr) fetch(next + r * m.stride, 2 * kLanes * n);
                for (int b = 0; b < B; ++b) {
                    const F factor = splat(p[b * p_stride + first + r]);
                    sum[b][n].first += factor * v.first;
                    sum[b][n].second += factor * v.second;
                }
            }
        }
    }
    for (int b = 0; b < B; ++b)
        for (int n = 0; n < N; ++n) store_pair_from<W>(y + b * y_stride + 2 * kLanes * n, sum[b][n]);
}

// The columns from `c` on, fewer than a pair of vectors, of one row of p.
template <class W>
__attribute__((noinline)) void mix_rest(const KvRows& m, std::int64_t c, const float* p, float* y) {
    const auto row = [&](std::int64_t r) {
        return static_cast<const W*>(m.blocks[r / m.block_rows]) + m.offset + r % m.block_rows * m.stride;
    };
    if (c + kLanes <= m.cols) {
        F sum = load(y + c);
        for (std::int64_t r = 0; r < m.rows; ++r) sum += splat(p[r]) * load(row(r) + c);
        store(y + c, sum);
        c += kLanes;
    }
    for (; c < m.cols; ++c)
        for (std::int64_t r = 0; r < m.rows; ++r) y[c] = step(p[r], load1(row(r) + c), y[c]);
}

template <class W, int B, int N>
INLINE void mix_cols(const KvRows& m, bool fetching, const float* p, std::int64_t p_stride, float* y, std::int64_t y_stride) {
    constexpr std::int64_t width = 2 * kLanes;
    std::int64_t c = 0;
    for (; c + width * N <= m.cols; c += width * N) mix_tile<W, B, N>(m, fetching, c, p, p_stride, y + c, y_stride);
    if constexpr (N > 2)
        for (; c + width * 2 <= m.cols; c += width * 2) mix_tile<W, B, 2>(m, fetching, c, p, p_stride, y + c, y_stride);
    for (; c + width <= m.cols; c += width) mix_tile<W, B, 1>(m, fetching, c, p, p_stride, y + c, y_stride);
    for (int b = 0; b < B && c < m.cols; ++b) mix_rest<W>(m, c, p + b * p_stride, y + b * y_stride);
}

template <class W>
INLINE void mix_batch(const KvRows& m, const float* p, std::int64_t p_stride, int batch, float* y, std::int64_t y_stride) {
    constexpr int kMore = kWide ? 2 : 1;  // as many sums as the registers hold
    bool fetching = true;
    for (; batch >= 4; batch -= 4, p += 4 * p_stride, y += 4 * y_stride, fetching = false)
        mix_cols<W, 4, kMore>(m, fetching, p, p_stride, y, y_stride);
    switch (batch) {
        case 3: return mix_cols<W, 3, kMore>(m, fetching, p, p_stride, y, y_stride);
        case 2: return mix_cols<W, 2, 2>(m, fetching, p, p_stride, y, y_stride);
        case 1: return mix_cols<W, 1, 4>(m, fetching, p, p_stride, y, y_stride);
        default: return;
    }
}

}  // namespace
