#include "core/checksum.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

std::uint64_t checksum(const void* data, std::size_t nbytes) noexcept { return XXH3_64bits(data, nbytes); }

}  // namespace poolweave
