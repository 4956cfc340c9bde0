// Sixteen floats at a time, in GCC's portable vector types: the compiler maps them to whatever the CPU
// has. AVX-512's own instructions are named where it does not find them. Numbers are float32 in registers;
// in memory they are float32 or bfloat16.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline vf splat(float x) { return vf{} + x; }

inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline vf as_floats(vu bits) {
    vf v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2**23: a sum with it ends in a whole number's bits

// The smaller and the larger, where a NaN in `b` is passed over; numbers of 16 bits to 32 bits and back;
// x * 2**n for whole n from -126 to 127.
#if defined(__AVX512F__)
inline vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)b, (__m512)a); }
inline vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)b, (__m512)a); }
inline vu widened(vh bits) { return (vu)_mm512_cvtepu16_epi32((__m256i)bits); }
inline vh narrowed(vu bits) { return (vh)_mm512_cvtepi32_epi16((__m512i)bits); }
inline vf times_power(vf x, vf n) { return (vf)_mm512_scalef_ps((__m512)x, (__m512)n); }
#else
inline vf min(vf a, vf b) { return b < a ? b : a; }
inline vf max(vf a, vf b) { return b > a ? b : a; }
inline vu widened(vh bits) { return __builtin_convertvector(bits, vu); }
inline vh narrowed(vu bits) { return __builtin_convertvector(bits, vh); }
inline vf times_power(vf x, vf n) {
    const vf shifted = n + ROUNDING;
    vu bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return x * as_floats((bits - 0x4b400000u + 127u) << 23);
}
#endif

inline vf load(const bf16* p) {
    vh half;
    std::memcpy(&half, p, sizeof half);
    return as_floats(widened(half) << 16);
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// The bits of bf16: round to nearest, ties to even, as torch does; a NaN stays one. The instruction for it
// takes numbers below the smallest normal one for 0.
#if defined(__AVX512BF16__)
inline vh halves(vf v) {
    const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    vh bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}
inline vu upper_halves(vf v) { return widened(halves(v)); }
#else
inline vu upper_halves(vf v) {
    vu bits;
    std::memcpy(&bits, &v, sizeof bits);
    const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return v == v ? rounded : vu{} + 0x7fc0u;
}
inline vh halves(vf v) { return narrowed(upper_halves(v)); }
#endif

inline void store(bf16* p, vf v) {
    const vh half = halves(v);
    std::memcpy(p, &half, sizeof half);
}

// C vectors of one head, in an order of the compiler's own: two bf16 vectors at once come as the even
// numbers and the odd ones, which takes two operations instead of four. Sums over a head do not mind;
// store_head puts everything back in its place.
template <int C>
inline void load_head(vf (&v)[C], const float* p) {
    for (int c = 0; c < C; c++) v[c] = load(p + c * LANES);
}
template <int C>
inline void load_head(vf (&v)[C], const bf16* p) {
    for (int c = 0; c + 1 < C; c += 2) {
        vu both;
        std::memcpy(&both, p + c * LANES, sizeof both);
        v[c] = as_floats(both << 16);
        v[c + 1] = as_floats(both & 0xffff0000u);
    }
    if (C % 2) v[C - 1] = load(p + (C - 1) * LANES);
}
template <int C>
inline void store_head(float* p, const vf (&v)[C]) {
    for (int c = 0; c < C; c++) store(p + c * LANES, v[c]);
}
template <int C>
inline void store_head(bf16* p, const vf (&v)[C]) {
    for (int c = 0; c + 1 < C; c += 2) {
        const vu both = upper_halves(v[c]) | upper_halves(v[c + 1]) << 16;
        std::memcpy(p + c * LANES, &both, sizeof both);
    }
    if (C % 2) store(p + (C - 1) * LANES, v[C - 1]);
}

inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    p->bits = uint16_t(bits >> 16);  // only used for numbers that bf16 holds exactly
}

// What the number becomes when it is kept in memory as T: eager torch rounds after every operator.
template <class T>
inline vf rounded(vf v);
template <>
inline vf rounded<float>(vf v) {
    return v;
}
template <>
inline vf rounded<bf16>(vf v) {
    return as_floats(upper_halves(v) << 16);
}

// In float64: one lane may hold far more than the others.
inline float sum(vf v) {
    typedef double vd __attribute__((vector_size(64)));
    typedef float half __attribute__((vector_size(32)));
    typedef int64_t places __attribute__((vector_size(64)));
    half halves[2];
    std::memcpy(halves, &v, sizeof v);
    vd total = __builtin_convertvector(halves[0], vd) + __builtin_convertvector(halves[1], vd);
    total += __builtin_shuffle(total, places{4, 5, 6, 7, 0, 1, 2, 3});
    total += __builtin_shuffle(total, places{2, 3, 0, 1, 6, 7, 4, 5});
    return float(total[0] + total[1]);
}

inline float highest(vf v) {
    v = max(v, __builtin_shuffle(v, vi{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = max(v, __builtin_shuffle(v, vi{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = max(v, __builtin_shuffle(v, vi{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    return v[1] > v[0] ? v[1] : v[0];
}

// exp by Cody and Waite's reduction and the polynomial of Cephes' expf; relative error below 2e-7.
// Results below the smallest normal number become 0, results above the largest one stay at 2.4e38.
inline vf exp(vf x) {
    const vi is_tiny = x < -87.33654f;  // comparisons let a NaN pass
    x = min(x, splat(88.37626f));
    vf n = (x * 1.44269504f + ROUNDING) - ROUNDING;
    vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return is_tiny ? splat(0.0f) : times_power(p, n);
}
