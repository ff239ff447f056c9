#include "core/checksum.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

std::uint64_t checksum(const void* data, std::size_t nbytes) noexcept { return XXH3_64bits(data, nbytes); }

struct Hasher::State {
    XXH3_state_t xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) { reset(); }
Hasher::~Hasher() = default;

void Hasher::reset() noexcept { XXH3_64bits_reset(&state_->xxh); }
void Hasher::update(const void* data, std::size_t nbytes) noexcept { XXH3_64bits_update(&state_->xxh, data, nbytes); }
std::uint64_t Hasher::digest() const noexcept { return XXH3_64bits_digest(&state_->xxh); }

}  // namespace poolweave
