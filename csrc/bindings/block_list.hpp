// Blocks as Python sees them: handles in token order and the epoch of the pool they came from. A native value, because
// making a numpy array costs more than allocating a block.
#pragma once

#include <cstdint>
#include <vector>

namespace poolweave::bindings {

struct BlockList {
    std::vector<std::uint64_t> handles;
    std::uint64_t owner = 0;  // 0: not known
};

}  // namespace poolweave::bindings
