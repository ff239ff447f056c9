// What the kernels are made of: vectors of floats as wide as the instruction set has them, loads of both element types,
// sums over lanes, e^x. Part of kernels.inl.

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

using F = float __attribute__((vector_size(4 * kLanes)));
using F8 = float __attribute__((vector_size(32)));
using F4 = float __attribute__((vector_size(16)));
using F2 = float __attribute__((vector_size(8)));
using I = std::int32_t __attribute__((vector_size(4 * kLanes)));
using U = std::uint32_t __attribute__((vector_size(4 * kLanes)));
using H = std::uint16_t __attribute__((vector_size(2 * kLanes)));
using Q = std::uint64_t __attribute__((vector_size(4 * kLanes)));

#define INLINE inline __attribute__((always_inline))

INLINE F8 load8(const float* p) {
    F8 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

INLINE F load(const float* p) {
    F v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }

// bf16 is the upper half of a float.
INLINE F load(const std::uint16_t* p) {
    H half;
    __builtin_memcpy(&half, p, sizeof half);
    const U bits = __builtin_convertvector(half, U) << 16;
    F v;
    __builtin_memcpy(&v, &bits, sizeof v);
    return v;
}

// Keeps a loaded vector in a register for all its uses: the compiler would load it again for each, and loads are what
// these loops run out of first.
INLINE F kept(F v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX2__)
    asm("" : "+x"(v));
#endif
    return v;
}

struct Pair {
    F first, second;
};

INLINE Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }

// A 32-bit word of bf16 holds two columns: a shift widens the even ones, a mask the odd ones. What they meet is brought
// into that order.
INLINE Pair widened(U words) {
    const U low = words << 16, high = words & 0xffff0000U;
    Pair v;
    __builtin_memcpy(&v.first, &low, sizeof low);
    __builtin_memcpy(&v.second, &high, sizeof high);
    return v;
}

INLINE Pair load_pair(const std::uint16_t* p) {
    U words;
    __builtin_memcpy(&words, p, sizeof words);
    return widened(words);
}

// The same with one load for both, where the loop waits for loads. Where it waits for sums, two loads cost nothing.
INLINE Pair load_pair_once(const std::uint16_t* p) {
    F words;
    __builtin_memcpy(&words, p, sizeof words);
    return widened((U)kept(words));
}

#if defined(__AVX512F__)
INLINE F splat(float x) { return F{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE Pair apart(Pair v) {  // columns in order -> even ones, odd ones
    return {__builtin_shufflevector(v.first, v.second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
            __builtin_shufflevector(v.first, v.second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

INLINE Pair together(Pair v) {
    return {__builtin_shufflevector(v.first, v.second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
            __builtin_shufflevector(v.first, v.second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}

// 8 numbers in each half, and a half of a vector.
INLINE F both_halves(const float* p) {
    const F8 v = load8(p);
    return kept(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE F8 half(F v, int which) {
    return which == 0 ? __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7)
                      : __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
#else
INLINE F splat(float x) { return F{x, x, x, x, x, x, x, x}; }

INLINE Pair apart(Pair v) {
    return {__builtin_shufflevector(v.first, v.second, 0, 2, 4, 6, 8, 10, 12, 14),
            __builtin_shufflevector(v.first, v.second, 1, 3, 5, 7, 9, 11, 13, 15)};
}

INLINE Pair together(Pair v) {
    return {__builtin_shufflevector(v.first, v.second, 0, 8, 1, 9, 2, 10, 3, 11),
            __builtin_shufflevector(v.first, v.second, 4, 12, 5, 13, 6, 14, 7, 15)};
}

INLINE F both_halves(const float* p) { return load(p); }

INLINE F8 half(F v, int) { return v; }
#endif

// Two vectors of floats in the order in which weights of type W come out of `load_pair`, and back.
template <class W>
INLINE Pair load_pair_as(const float* p) {
    const Pair v = load_pair(p);
    return sizeof(W) == sizeof(float) ? v : apart(v);
}

template <class W>
INLINE void store_pair_from(float* p, Pair v) {
    const Pair ordered = sizeof(W) == sizeof(float) ? v : together(v);
    store(p, ordered.first);
    store(p + kLanes, ordered.second);
}

INLINE float load1(const float* p) { return *p; }

INLINE float load1(const std::uint16_t* p) {
    const std::uint32_t bits = static_cast<std::uint32_t>(*p) << 16;
    float v;
    __builtin_memcpy(&v, &bits, sizeof v);
    return v;
}

// The sums over lanes of four vectors, each by the same fixed tree.
INLINE F4 add_eight(F8 a, F8 b, F8 c, F8 d) {
    const F8 ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const F8 cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const F8 all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
}

#if defined(__AVX512F__)
INLINE F4 add_lanes(F a, F b, F c, F d) {
    const F ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const F cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const F all = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    const F8 eight = half(all, 0) + half(all, 1);
    return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
}
#else
INLINE F4 add_lanes(F a, F b, F c, F d) { return add_eight(a, b, c, d); }
#endif

INLINE float add_lanes(F v) { return add_lanes(v, v, v, v)[0]; }

// One scalar step of a sum, fused where vectors are: else the compiler may fuse some steps of a loop and not others.
INLINE float step(float a, float b, float sum) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, sum);
#else
    return a * b + sum;
#endif
}

INLINE F larger(F a, F b) { return a > b ? a : b; }

// e^x to about 2 ulp for x in [-87, 88], clamped outside: Cody-Waite reduction and a polynomial (Cephes).
INLINE F exp_lanes(F x) {
    x = larger(x, splat(-87.0F));
    x = x < splat(88.0F) ? x : splat(88.0F);
    const F round = splat(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
    const F n = (x * splat(1.44269504088896341F) + round) - round;
    const F r = (x - n * splat(0.693359375F)) - n * splat(-2.12194440e-4F);
    F p = splat(1.9875691500e-4F);
    p = p * r + splat(1.3981999507e-3F);
    p = p * r + splat(8.3334519073e-3F);
    p = p * r + splat(4.1665795894e-2F);
    p = p * r + splat(1.6666665459e-1F);
    p = p * r + splat(5.0000001201e-1F);
    p = p * (r * r) + r + splat(1.0F);
    const I power = (__builtin_convertvector(n, I) + 127) << 23;
    F scale;
    __builtin_memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

}  // namespace
