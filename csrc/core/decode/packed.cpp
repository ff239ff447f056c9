#include "core/decode/packed.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr std::size_t kHugePage = 2 << 20;
constexpr std::size_t kChunk = 64 << 20;  // of address space: memory comes with the first write

// Where column c of a row lies within its 32 bytes of a step, in elements.
std::int64_t place(Dtype dtype, std::int64_t c) noexcept { return dtype == Dtype::kF32 ? c : c % 8 * 2 + c / 8; }

template <class T>
void fill(const Matrix& from, const Packed& to, T* out) {
    const T* data = static_cast<const T*>(from.data);
    const std::int64_t step = to.step();
    for (std::int64_t first = 0; first < from.rows; first += kTileRows) {
        for (std::int64_t c = 0; c < from.cols; c += step) {
            for (std::int64_t r = first; r < first + kTileRows; ++r, out += step) {
                if (r >= from.rows) continue;  // fresh memory is zeros
                const T* row = data + r * from.stride;
                const std::int64_t end = std::min(step, from.cols - c);
                for (std::int64_t i = 0; i < end; ++i) out[place(from.dtype, i)] = row[c + i];
            }
        }
    }
}

std::byte* place_in(std::byte* memory, const Matrix& from, const Packed& to) {
    if (from.dtype == Dtype::kF32) fill(from, to, reinterpret_cast<float*>(memory));
    else fill(from, to, reinterpret_cast<std::uint16_t*>(memory));
    return memory;
}

}  // namespace

void Packed::read_row(std::int64_t row, float* out) const noexcept {
    const std::byte* tile = data + row / kTileRows * tile_bytes() + row % kTileRows * 32;
    for (std::int64_t c = 0; c < cols; ++c) {
        const std::byte* piece = tile + c / step() * kTileRows * 32;
        const std::int64_t at = place(dtype, c % step());
        out[c] = dtype == Dtype::kF32
                     ? reinterpret_cast<const float*>(piece)[at]
                     : std::bit_cast<float>(static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t*>(piece)[at]) << 16);
    }
}

PackedStore::~PackedStore() {
    for (const Chunk& chunk : chunks_) munmap(chunk.base, chunk.nbytes);
}

Packed PackedStore::pack(const Matrix& m) {
    if (!m) return {};
    Packed packed{nullptr, m.rows, m.cols, m.dtype};
    packed.data = place_in(take(packed.nbytes()), m, packed);
    return packed;
}

Matrix PackedStore::keep(const Matrix& m) {
    if (!m) return {};
    const std::int64_t width = m.cols * dtype_bytes(m.dtype), step = m.stride * dtype_bytes(m.dtype);
    std::byte* memory = take((m.rows * width + 63) / 64 * 64);
    for (std::int64_t r = 0; r < m.rows; ++r)
        std::memcpy(memory + r * width, static_cast<const std::byte*>(m.data) + r * step, static_cast<std::size_t>(width));
    return {memory, m.rows, m.cols, m.cols, m.dtype};
}

std::byte* PackedStore::take(std::int64_t nbytes) {
    const auto size = static_cast<std::size_t>(nbytes);
    if (chunks_.empty() || chunks_.back().nbytes - used_ < size) {
        const std::size_t chunk = (std::max(size, kChunk) + 2 * kHugePage - 1) / kHugePage * kHugePage;
        void* base = mmap(nullptr, chunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED)
            throw Error(Code::kOs, "no memory for " + std::to_string(chunk) + " bytes of weights: errno " + std::to_string(errno),
                        {errno});
        chunks_.push_back({static_cast<std::byte*>(base), chunk});
        madvise(base, chunk, MADV_HUGEPAGE);  // an advice: without it the weights lie on small pages
        const auto address = reinterpret_cast<std::uintptr_t>(base);
        used_ = (address + kHugePage - 1) / kHugePage * kHugePage - address;
    }
    std::byte* start = chunks_.back().base + used_;
    used_ += size;
    return start;
}

}  // namespace poolweave::decode
