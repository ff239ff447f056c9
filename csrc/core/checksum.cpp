#include "core/checksum.hpp"

#include <cstring>

#define XXH_INLINE_ALL
#include "core/hash_kernels.hpp"
#include "xxhash.h"

namespace poolweave {

std::uint64_t checksum(const void* data, std::size_t nbytes) noexcept { return hash_kernels().sum(data, nbytes); }

void wide_checksum(std::span<const std::byte> head, std::span<const std::byte> tail, std::span<std::byte, 16> out) noexcept {
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, head.data(), head.size());
    XXH3_128bits_update(&state, tail.data(), tail.size());
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
    std::memcpy(out.data(), canonical.digest, out.size());
}

struct Hasher::State {
    XXH3_state_t xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) { reset(); }
Hasher::~Hasher() = default;

void Hasher::reset() noexcept { XXH3_64bits_reset(&state_->xxh); }
void Hasher::update(const void* data, std::size_t nbytes) noexcept { hash_kernels().update(&state_->xxh, data, nbytes); }
void Hasher::copy(void* target, const void* source, std::size_t nbytes) noexcept {
    hash_kernels().copy(&state_->xxh, target, source, nbytes);
}
std::uint64_t Hasher::digest() const noexcept { return XXH3_64bits_digest(&state_->xxh); }

}  // namespace poolweave
