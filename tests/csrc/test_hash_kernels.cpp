// Every table of hash kernels against the library's one-shot sum: sizes, alignments, and any mix of calls over a state.
#define XXH_INLINE_ALL
#include "core/hash_kernels.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "xxhash.h"

using namespace poolweave;

namespace {

std::vector<unsigned char> noise(std::size_t nbytes) {
    std::vector<unsigned char> bytes(nbytes);
    std::mt19937_64 random(3);
    for (auto& one : bytes) one = static_cast<unsigned char>(random());
    return bytes;
}

// Source, target and the untouched bytes around the target, for pieces at any alignment.
void streams(const HashKernels& kernels, const std::vector<unsigned char>& source, std::size_t length, std::size_t shift,
             std::mt19937& random) {
    std::vector<unsigned char> target(length + shift + 128, 0xEE);
    unsigned char* const to = target.data() + shift;
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (std::size_t at = 0; at < length;) {
        const std::size_t whole = std::size_t{64} << random() % 12;  // runs of KV are such sizes, and others are allowed
        const std::size_t n = std::min<std::size_t>(length - at, random() % 3 == 0 ? random() % 9000 : whole);
        if (random() % 5 == 0) {
            kernels.update(&state, source.data() + at, n);
            std::memcpy(to + at, source.data() + at, n);
        } else {
            kernels.copy(&state, to + at, source.data() + at, n);
        }
        at += n;
        CHECK(XXH3_64bits_digest(&state) == XXH3_64bits(source.data(), at));
    }
    CHECK(std::memcmp(to, source.data(), length) == 0);
    CHECK(std::all_of(target.data(), to, [](unsigned char one) { return one == 0xEE; }));
    CHECK(std::all_of(to + length, target.data() + target.size(), [](unsigned char one) { return one == 0xEE; }));
}

void table(const HashKernels& kernels) {
    const auto source = noise(300'000);
    for (std::size_t n = 0; n < 2100; ++n) CHECK(kernels.sum(source.data() + n % 7, n) == XXH3_64bits(source.data() + n % 7, n));
    std::mt19937 random(11);
    for (std::size_t length : {0u, 1u, 240u, 241u, 255u, 256u, 257u, 1024u, 4095u, 4096u, 4097u, 65536u, 65537u, 163840u, 300'000u}) {
        for (std::size_t shift : {0u, 1u, 8u, 31u, 32u, 63u}) {
            for (int round = 0; round < 4; ++round) streams(kernels, source, length, shift, random);
        }
    }
}

// The sums of one state may come from tables in turn: they share its form.
void one_state_for_all() {
    if (avx2_hash_kernels() == nullptr) return;
    const auto source = noise(100'000);
    std::vector<unsigned char> target(source.size());
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (std::size_t at = 0, i = 0; at < source.size(); at += 12'500, ++i) {
        const HashKernels& kernels = i % 2 == 0 ? portable_hash_kernels() : *avx2_hash_kernels();
        kernels.copy(&state, target.data() + at, source.data() + at, 12'500);
    }
    CHECK(XXH3_64bits_digest(&state) == XXH3_64bits(source.data(), source.size()));
    CHECK(source == target);
}

}  // namespace

int main() {
    table(portable_hash_kernels());
    if (avx2_hash_kernels() != nullptr) table(*avx2_hash_kernels());
    one_state_for_all();
    return 0;
}
