// A run of bytes that is copied as one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poolweave {

struct Piece {
    std::byte* to;
    const std::byte* from;
    std::uint64_t nbytes;
};

}  // namespace poolweave
