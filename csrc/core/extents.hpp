// Where the bytes of blocks lie: strided grids, windows onto them, and the runs of memory they come down to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace poolweave {

// The memory of one tier. Row r of plane p of slot s lies at base + s*slot_stride + p*plane_stride + r*row_stride.
// A row is one token's heads of one part of one layer; strides say whether blocks are aggregated, layered or token-major.
struct Grid {
    std::uint64_t base = 0;    // address of the first byte
    std::uint64_t nbytes = 0;  // nothing at or past base + nbytes is ever touched
    std::uint64_t slot_stride = 0;
    std::uint64_t plane_stride = 0;
    std::uint64_t row_stride = 0;
    std::uint64_t row_bytes = 0;
    std::uint32_t num_slots = 0;
    std::uint32_t num_planes = 0;
    std::uint32_t num_rows = 0;

    void validate() const;  // throws kConfig unless every slot lies inside nbytes
};

// The part of each block that moves: planes [first_plane, first_plane + num_planes) and, in each row, a byte range.
struct Window {
    std::uint32_t first_plane = 0;
    std::uint32_t num_planes = 0;
    std::uint64_t row_offset = 0;
    std::uint64_t row_bytes = 0;
};

struct Run {
    std::uint64_t address;
    std::uint64_t nbytes;
};

// The runs of a list of blocks in canonical order (block, plane, row, byte), adjacent runs of a block merged. Two
// extents of the same block_bytes can be copied onto each other whatever their grids. Does not own the memory.
class Extents {
  public:
    // `tiers[i]` picks the grid (by its index) and `slots[i]` the slot of block i. Throws kTransfer for a slot or tier
    // outside, kConfig for windows that are not inside the grid. Cost: O(runs).
    Extents(std::span<const Grid> grids, std::span<const std::uint8_t> tiers, std::span<const std::int32_t> slots,
            std::span<const Window> windows);

    std::size_t num_blocks() const noexcept { return ends_.size() - 1; }
    std::size_t num_runs() const noexcept { return runs_.size(); }
    std::uint64_t block_bytes() const noexcept { return block_bytes_; }
    std::uint64_t nbytes() const noexcept { return block_bytes_ * num_blocks(); }
    std::span<const Run> runs() const noexcept { return runs_; }
    std::span<const Run> runs_of(std::size_t block) const noexcept {
        return std::span(runs_).subspan(ends_[block], ends_[block + 1] - ends_[block]);
    }
    // How many runs are left when neighbours are merged across blocks too: the calls a transport needs at best.
    std::size_t num_coalesced() const noexcept;

  private:
    void add_block(const Grid& grid, std::uint64_t slot, std::span<const Window> windows);
    void add_run(std::uint64_t address, std::uint64_t nbytes, std::size_t first);

    std::vector<Run> runs_;
    std::vector<std::size_t> ends_{0};
    std::uint64_t block_bytes_ = 0;
};

// The window that is the whole block of a grid.
Window whole(const Grid& grid) noexcept;

// The grids of all tiers of one instance, checked once. Tiers are named by any numbers below 255.
class Tiers {
  public:
    static constexpr std::uint8_t kNone = 255;

    // Throws kConfig for two grids of one tier and for a grid whose slots leave its memory.
    Tiers(std::span<const std::uint8_t> names, std::span<const Grid> grids);

    // As the constructor of Extents, `tiers` being names. Throws kTransfer for a tier that is not there.
    Extents extents(std::span<const std::uint8_t> tiers, std::span<const std::int32_t> slots,
                    std::span<const Window> windows) const;

  private:
    std::vector<Grid> grids_;
    std::vector<std::uint8_t> index_;  // by name
};

}  // namespace poolweave
