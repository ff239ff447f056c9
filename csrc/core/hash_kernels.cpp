#include "core/hash_kernels.hpp"

#include <algorithm>

#define XXH_INLINE_ALL
#include "core/stream_copy.hpp"
#include "xxhash.h"

namespace poolweave {
namespace {

constexpr std::size_t kCachedPiece = 64u << 10;  // read once from memory, and once more from the cache

std::uint64_t sum(const void* data, std::size_t nbytes) noexcept { return XXH3_64bits(data, nbytes); }

void update(void* state, const void* data, std::size_t nbytes) noexcept {
    XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, nbytes);
}

void copy(void* state, void* target, const void* source, std::size_t nbytes) noexcept {
    auto* to = static_cast<char*>(target);
    const auto* from = static_cast<const char*>(source);
    while (nbytes > 0) {
        const std::size_t n = std::min(nbytes, kCachedPiece);
        update(state, from, n);
        stream_copy(to, from, n);
        to += n, from += n, nbytes -= n;
    }
}

}  // namespace

const HashKernels& portable_hash_kernels() noexcept {
    static constexpr HashKernels table{"portable", sum, update, copy};
    return table;
}

const HashKernels& hash_kernels() noexcept {
    static const HashKernels& chosen = avx2_hash_kernels() != nullptr ? *avx2_hash_kernels() : portable_hash_kernels();
    return chosen;
}

}  // namespace poolweave
