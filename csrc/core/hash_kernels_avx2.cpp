// XXH3-64 for AVX2. CMake compiles this file alone with those instructions; nothing in it runs unless the processor has
// them, so it uses no inline function of the standard library, which the linker could share with other files.
#include "core/hash_kernels.hpp"

#if defined(__AVX2__)
#include <immintrin.h>

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {
namespace {

constexpr std::size_t kStripe = XXH_STRIPE_LEN;
constexpr std::size_t kAhead = 1024;      // bytes that the source is prefetched ahead
constexpr std::size_t kWorthIt = 4096;    // below this the two loops one after the other are as fast
constexpr std::size_t kVector = sizeof(__m256i);
static_assert(kStripe == 2 * kVector && XXH_SECRET_DEFAULT_SIZE - kStripe == 16 * XXH_SECRET_CONSUME_RATE);

std::uint64_t sum(const void* data, std::size_t nbytes) noexcept { return XXH3_64bits(data, nbytes); }

void update(void* state, const void* data, std::size_t nbytes) noexcept {
    XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, nbytes);
}

// The accumulators of a state, in registers while stripes are added: XXH3_accumulate and XXH3_scrambleAcc.
class Lanes {
  public:
    explicit Lanes(const XXH3_state_t& state)
        : low_(load(state.acc)),
          high_(load(state.acc + 4)),
          key_(secret_of(state) + state.nbStripesSoFar * XXH_SECRET_CONSUME_RATE),
          first_key_(secret_of(state)),
          last_key_(secret_of(state) + state.secretLimit) {}

    void save(XXH3_state_t& state) const noexcept {
        _mm256_store_si256(reinterpret_cast<__m256i*>(state.acc), low_);
        _mm256_store_si256(reinterpret_cast<__m256i*>(state.acc + 4), high_);
        state.nbStripesSoFar = static_cast<std::size_t>(key_ - first_key_) / XXH_SECRET_CONSUME_RATE;
    }

    void add(__m256i low, __m256i high) noexcept {
        low_ = added(low_, low, load(key_));
        high_ = added(high_, high, load(key_ + kVector));
        key_ += XXH_SECRET_CONSUME_RATE;
        if (key_ != last_key_) return;  // the last key of a block of stripes scrambles
        low_ = scrambled(low_, load(last_key_));
        high_ = scrambled(high_, load(last_key_ + kVector));
        key_ = first_key_;
    }

    static __m256i load(const void* at) noexcept { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

  private:
    static const std::uint8_t* secret_of(const XXH3_state_t& state) noexcept {
        return state.extSecret != nullptr ? state.extSecret : state.customSecret;
    }

    static __m256i added(__m256i sum, __m256i data, __m256i key) noexcept {
        const __m256i keyed = _mm256_xor_si256(data, key);
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        return _mm256_add_epi64(product, _mm256_add_epi64(sum, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
    }

    static __m256i scrambled(__m256i sum, __m256i key) noexcept {
        const __m256i prime = _mm256_set1_epi32(static_cast<int>(XXH_PRIME32_1));
        const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), key);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }

    __m256i low_;
    __m256i high_;
    const std::uint8_t* key_;
    const std::uint8_t* first_key_;
    const std::uint8_t* last_key_;
};

// Adds `stripes` stripes at `from` and writes them to `to`, aligned to a vector, out of the registers they were read into.
void add_and_stream(Lanes& lanes, char* to, const char* from, std::size_t stripes) noexcept {
    for (; stripes > 0; --stripes, from += kStripe, to += kStripe) {
        _mm_prefetch(from + kAhead, _MM_HINT_NTA);  // past the end too: a prefetch cannot fault
        const __m256i low = Lanes::load(from), high = Lanes::load(from + kVector);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + kVector), high);
        lanes.add(low, high);
    }
}

void copy_both(XXH3_state_t& state, char* to, const char* from, std::size_t nbytes) noexcept {
    XXH3_64bits_update(&state, from, nbytes);
    __builtin_memcpy(to, from, nbytes);
}

// XXH3_update of the library keeps 1 to 256 bytes in its buffer, after them the last stripe that was added. So does this.
void copy(void* opaque, void* target, const void* source, std::size_t nbytes) noexcept {
    auto& state = *static_cast<XXH3_state_t*>(opaque);
    auto* to = static_cast<char*>(target);
    const auto* from = static_cast<const char*>(source);
    const std::size_t head = state.bufferedSize > 0 ? sizeof state.buffer - state.bufferedSize : 0;
    if (nbytes < kWorthIt || (reinterpret_cast<std::uintptr_t>(to) + head) % kVector != 0) {
        copy_both(state, to, from, nbytes);
        return;
    }
    copy_both(state, to, from, head);
    from += head, to += head, nbytes -= head;
    Lanes lanes(state);
    if (state.bufferedSize > 0) {
        for (std::size_t at = 0; at < sizeof state.buffer; at += kStripe) {
            lanes.add(Lanes::load(state.buffer + at), Lanes::load(state.buffer + at + kVector));
        }
    }
    const std::size_t stripes = (nbytes - 1) / kStripe, rest = nbytes - stripes * kStripe;
    add_and_stream(lanes, to, from, stripes);
    lanes.save(state);
    from += stripes * kStripe, to += stripes * kStripe;
    __builtin_memcpy(state.buffer + sizeof state.buffer - kStripe, from - kStripe, kStripe);
    __builtin_memcpy(state.buffer, from, rest);
    __builtin_memcpy(to, from, rest);
    state.bufferedSize = static_cast<XXH32_hash_t>(rest);
    state.totalLen += nbytes;
    _mm_sfence();
}

}  // namespace

const HashKernels* avx2_hash_kernels() noexcept {
    static constexpr HashKernels table{"avx2", sum, update, copy};
    return __builtin_cpu_supports("avx2") ? &table : nullptr;
}

}  // namespace poolweave
#else
namespace poolweave {

const HashKernels* avx2_hash_kernels() noexcept { return nullptr; }

}  // namespace poolweave
#endif
