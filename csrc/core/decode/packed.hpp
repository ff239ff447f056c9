// Weights in the order in which decoding streams them, in memory of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/decode/matrix.hpp"

namespace poolweave::decode {

constexpr std::int64_t kTileRows = 4;

// A matrix in tiles of 4 rows: the tile's first 32 bytes of each row, then the next 32 of each, so that four sums run over
// one stream. What a row or a tile lacks is zeros.
//
//   float32   a0-a7   b0-b7   c0-c7   d0-d7   | a8-a15 ...
//   bfloat16  a0-a15  b0-b15  c0-c15  d0-d15  | a16-a31 ...   in 32-bit words {column i, column i + 8}: a shift and a
//                                                             mask widen them
struct Packed {
    const std::byte* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    Dtype dtype = Dtype::kF32;

    explicit operator bool() const noexcept { return data != nullptr; }

    // Columns of one row in 32 bytes, and how many times that a row has.
    std::int64_t step() const noexcept { return 32 / dtype_bytes(dtype); }
    std::int64_t steps() const noexcept { return (cols + step() - 1) / step(); }

    std::int64_t tile_bytes() const noexcept { return steps() * kTileRows * 32; }
    std::int64_t nbytes() const noexcept { return (rows + kTileRows - 1) / kTileRows * tile_bytes(); }

    // Row `row`, widened, to out [cols].
    void read_row(std::int64_t row, float* out) const noexcept;
};

// Owns packed weights, one after the other as they were packed: on huge pages where the system gives them, as a stream
// over small ones stops at each. Give weights in the order of their use.
class PackedStore {
  public:
    PackedStore() = default;
    PackedStore(const PackedStore&) = delete;
    PackedStore& operator=(const PackedStore&) = delete;
    ~PackedStore();

    // A copy of `m`; valid as long as the store. An empty matrix stays empty. Throws kOs without memory.
    Packed pack(const Matrix& m);

    // A copy in rows as they are, for what is read along its columns.
    Matrix keep(const Matrix& m);

  private:
    struct Chunk {
        std::byte* base;
        std::size_t nbytes;
    };

    std::byte* take(std::int64_t nbytes);

    std::vector<Chunk> chunks_;
    std::size_t used_ = 0;  // of the last chunk
};

}  // namespace poolweave::decode
