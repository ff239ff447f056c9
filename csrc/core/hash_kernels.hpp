// The inner loops of XXH3-64, in one table an instruction set. Which table runs is chosen once, at run time; all of them
// compute the same sums, over one and the same state (xxHash's XXH3_state_t).
#pragma once

#include <cstddef>
#include <cstdint>

namespace poolweave {

struct HashKernels {
    const char* name;

    // XXH3-64 of `nbytes` at `data`.
    std::uint64_t (*sum)(const void* data, std::size_t nbytes) noexcept;

    // Adds `nbytes` at `data` to `state`.
    void (*update)(void* state, const void* data, std::size_t nbytes) noexcept;

    // The same, and copies them to `target` past the caches. Each byte is read from memory once. No overlap.
    void (*copy)(void* state, void* target, const void* source, std::size_t nbytes) noexcept;
};

// The tables this build has for this machine: portable always, AVX2 where the processor has it.
const HashKernels& portable_hash_kernels() noexcept;
const HashKernels* avx2_hash_kernels() noexcept;  // null where it cannot run

// The fastest one that runs here.
const HashKernels& hash_kernels() noexcept;

}  // namespace poolweave
