// Copies blocks between extents while a lease holds, and hashes them on the way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/abort.hpp"
#include "core/extents.hpp"

namespace poolweave {

// What must stay true during a copy. `word` is the owner's lease word: it holds `lease` until the owner takes the
// blocks back, and is cleared before they may change. Reading it after a chunk proves the chunk.
struct Guard {
    const std::atomic<std::uint64_t>* word = nullptr;
    std::uint64_t lease = 0;
    const Abort* abort = nullptr;
};

enum class Outcome : std::uint8_t { kDone, kRevoked, kAborted };

// Copies blocks [first, first + count) of `from` onto the same blocks of `to`, with up to `threads` threads.
// `hashes` (null, or `count` words) receives the XXH3-64 of each block as it was copied. On kRevoked or kAborted the
// destination is undefined. Source and destination must not overlap. Throws kConfig when they do not fit.
Outcome copy_blocks(const Extents& from, const Extents& to, std::size_t first, std::size_t count, unsigned threads,
                    const Guard& guard, std::uint64_t* hashes);

// XXH3-64 of each of the `count` blocks from `first`, in canonical order.
void hash_blocks(const Extents& extents, std::size_t first, std::size_t count, unsigned threads, std::uint64_t* hashes);

// True while the lease holds: call after reading what it guards.
bool holds(const Guard& guard) noexcept;

}  // namespace poolweave
