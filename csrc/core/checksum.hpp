// XXH3 64-bit checksums of memory that crosses a wire.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poolweave {

// XXH3-64 of `nbytes` at `data`; the same on every platform.
std::uint64_t checksum(const void* data, std::size_t nbytes) noexcept;

}  // namespace poolweave
