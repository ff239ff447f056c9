#include "core/stream_copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace poolweave {

#if defined(__SSE2__)

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kWorthIt = 4096;
constexpr std::size_t kAhead = 1024;  // bytes that the source is prefetched ahead

}  // namespace

void stream_copy(void* target, const void* source, std::size_t nbytes) noexcept {
    auto* to = static_cast<char*>(target);
    const auto* from = static_cast<const char*>(source);
    if (nbytes < kWorthIt) {
        std::memcpy(to, from, nbytes);
        return;
    }
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= kLine; to += kLine, from += kLine, nbytes -= kLine) {
        _mm_prefetch(from + std::min(kAhead, nbytes - 1), _MM_HINT_NTA);
        const auto* const in = reinterpret_cast<const __m128i*>(from);
        auto* const out = reinterpret_cast<__m128i*>(to);
        const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    std::memcpy(to, from, nbytes);
    _mm_sfence();
}

#else

void stream_copy(void* target, const void* source, std::size_t nbytes) noexcept { std::memcpy(target, source, nbytes); }

#endif

}  // namespace poolweave
