// Rows of numbers as the executors see them: borrowed memory, two element types, no ownership.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poolweave::decode {

enum class Dtype : std::uint8_t { kF32, kBf16 };

constexpr std::int64_t dtype_bytes(Dtype dtype) noexcept { return dtype == Dtype::kF32 ? 4 : 2; }

// `rows` rows of `cols` numbers; row r begins at `data + r * stride` elements. The memory is the caller's.
struct Matrix {
    const void* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    std::int64_t stride = 0;
    Dtype dtype = Dtype::kF32;

    explicit operator bool() const noexcept { return data != nullptr; }

    Matrix slice(std::int64_t first, std::int64_t count) const noexcept {
        const auto offset = first * stride * dtype_bytes(dtype);
        return {static_cast<const std::byte*>(data) + offset, count, cols, stride, dtype};
    }
};

// Rows in blocks of `block_rows` rows each, of which the last may be less full: row r of a block begins
// `offset + r * stride` elements after where the block does. The memory is the caller's.
struct KvRows {
    const void* const* blocks = nullptr;
    const void* next = nullptr;  // the block read after these, fetched ahead; or null
    std::int64_t block_rows = 0;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    std::int64_t stride = 0;
    std::int64_t offset = 0;
    Dtype dtype = Dtype::kF32;
    bool weights = false;  // rows of weights: what meets them is never rounded
};

struct RmsNorm {
    const float* weight = nullptr;
    float eps = 1e-6F;

    explicit operator bool() const noexcept { return weight != nullptr; }
};

}  // namespace poolweave::decode
