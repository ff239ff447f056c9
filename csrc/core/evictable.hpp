// What the index asks its owner before it gives a block up: the seam between radix_tree and block_table.
#pragma once

#include <cstdint>

namespace poolweave {

class Evictable {
  public:
    virtual ~Evictable() = default;
    // True when the block behind `payload` may go: only the index still refers to it.
    virtual bool evictable(std::uint64_t payload) const noexcept = 0;
};

}  // namespace poolweave
