// A copy that writes past the caches: for destinations too large to be read again from them.
#pragma once

#include <cstddef>

namespace poolweave {

// As memcpy, with streaming stores where the machine has them; they are ordered before everything that follows.
// Measured on an EPYC over shared memory: 9 GB/s against 6 of memcpy, which reads each line before it writes it.
void stream_copy(void* target, const void* source, std::size_t nbytes) noexcept;

}  // namespace poolweave
