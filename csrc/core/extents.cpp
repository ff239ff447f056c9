#include "core/extents.hpp"

#include <string>

#include "core/error.hpp"

namespace poolweave {
namespace {

// sum += a * b; false when that leaves 64 bits.
bool add_product(std::uint64_t& sum, std::uint64_t a, std::uint64_t b) noexcept {
    std::uint64_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(sum, product, &sum);
}

void check_window(const Grid& grid, const Window& window) {
    if (window.num_planes == 0 || window.row_bytes == 0) {
        throw Error(Code::kConfig, "a window needs at least one plane and one byte a row");
    }
    if (std::uint64_t{window.first_plane} + window.num_planes > grid.num_planes) {
        throw Error(Code::kConfig, "window of planes " + std::to_string(window.first_plane) + " + " +
                                       std::to_string(window.num_planes) + " leaves the " +
                                       std::to_string(grid.num_planes) + " planes of the layout");
    }
    if (window.row_offset > grid.row_bytes || window.row_bytes > grid.row_bytes - window.row_offset) {
        throw Error(Code::kConfig, "window of row bytes " + std::to_string(window.row_offset) + " + " +
                                       std::to_string(window.row_bytes) + " leaves rows of " +
                                       std::to_string(grid.row_bytes) + " bytes");
    }
}

std::uint64_t window_bytes(const Grid& grid, std::span<const Window> windows) {
    std::uint64_t total = 0;
    for (const Window& window : windows) total += window.row_bytes * grid.num_rows * window.num_planes;
    return total;
}

}  // namespace

void Grid::validate() const {
    if (num_slots == 0 || num_planes == 0 || num_rows == 0 || row_bytes == 0) {
        throw Error(Code::kConfig, "a grid needs slots, planes, rows and bytes a row");
    }
    std::uint64_t last = row_bytes;
    const bool inside = add_product(last, num_slots - 1, slot_stride) && add_product(last, num_planes - 1, plane_stride) &&
                        add_product(last, num_rows - 1, row_stride);
    if (!inside || last > nbytes) {
        throw Error(Code::kConfig, std::to_string(num_slots) + " slots need more than the " + std::to_string(nbytes) +
                                       " bytes of their memory");
    }
}

Window whole(const Grid& grid) noexcept { return {0, grid.num_planes, 0, grid.row_bytes}; }

Tiers::Tiers(std::span<const std::uint8_t> names, std::span<const Grid> grids)
    : grids_(grids.begin(), grids.end()), index_(256, kNone) {
    if (names.size() != grids.size()) throw Error(Code::kConfig, "one name a grid is needed");
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (names[i] == kNone || index_[names[i]] != kNone) {
            throw Error(Code::kConfig, "tier " + std::to_string(names[i]) + " is named twice, or not a tier");
        }
        index_[names[i]] = static_cast<std::uint8_t>(i);
        grids_[i].validate();
    }
}

Extents Tiers::extents(std::span<const std::uint8_t> tiers, std::span<const std::int32_t> slots,
                       std::span<const Window> windows) const {
    std::vector<std::uint8_t> numbers(tiers.size());
    for (std::size_t i = 0; i < tiers.size(); ++i) numbers[i] = index_[tiers[i]];
    return Extents(grids_, numbers, slots, windows);
}

Extents::Extents(std::span<const Grid> grids, std::span<const std::uint8_t> tiers, std::span<const std::int32_t> slots,
                 std::span<const Window> windows) {
    if (tiers.size() != slots.size()) {
        throw Error(Code::kConfig, std::to_string(tiers.size()) + " tiers for " + std::to_string(slots.size()) + " slots");
    }
    for (const Grid& grid : grids) {
        grid.validate();
        for (const Window& window : windows) check_window(grid, window);
    }
    ends_.reserve(slots.size() + 1);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (tiers[i] >= grids.size() || slots[i] < 0 || static_cast<std::uint32_t>(slots[i]) >= grids[tiers[i]].num_slots) {
            throw Error(Code::kTransfer, "block " + std::to_string(i) + " lies at tier " + std::to_string(tiers[i]) +
                                             " slot " + std::to_string(slots[i]) + ", outside the memory it names");
        }
        const Grid& grid = grids[tiers[i]];
        const Window all = whole(grid);
        const auto used = windows.empty() ? std::span<const Window>(&all, 1) : windows;
        const std::uint64_t bytes = window_bytes(grid, used);
        if (block_bytes_ != 0 && bytes != block_bytes_) {
            throw Error(Code::kConfig, "the tiers of one instance hold blocks of different sizes");
        }
        block_bytes_ = bytes;
        add_block(grid, static_cast<std::uint64_t>(slots[i]), used);
    }
}

void Extents::add_run(std::uint64_t address, std::uint64_t nbytes, std::size_t first) {
    if (runs_.size() > first && runs_.back().address + runs_.back().nbytes == address) {
        runs_.back().nbytes += nbytes;
    } else {
        runs_.push_back({address, nbytes});
    }
}

void Extents::add_block(const Grid& grid, std::uint64_t slot, std::span<const Window> windows) {
    const std::size_t first = runs_.size();
    for (const Window& window : windows) {
        const bool full_rows = window.row_bytes == grid.row_stride;  // then the rows of a plane are one run
        for (std::uint64_t p = 0; p < window.num_planes; ++p) {
            const std::uint64_t plane = grid.base + slot * grid.slot_stride + (window.first_plane + p) * grid.plane_stride;
            if (full_rows) {
                add_run(plane + window.row_offset, window.row_bytes * grid.num_rows, first);
                continue;
            }
            for (std::uint64_t r = 0; r < grid.num_rows; ++r) {
                add_run(plane + r * grid.row_stride + window.row_offset, window.row_bytes, first);
            }
        }
    }
    ends_.push_back(runs_.size());
}

std::size_t Extents::num_coalesced() const noexcept {
    std::size_t count = 0;
    std::uint64_t end = 0;
    for (const Run& run : runs_) {
        count += (count == 0 || run.address != end);
        end = run.address + run.nbytes;
    }
    return count;
}

}  // namespace poolweave
