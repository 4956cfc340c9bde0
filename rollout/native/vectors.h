// Sixteen floats at a time, in GCC's and Clang's portable vector types: the compiler maps them to
// whatever the CPU has. Numbers are float32 in registers; in memory they are float32 or bfloat16.
#pragma once

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

inline vf load(const bf16* p) {
    vh half;
    std::memcpy(&half, p, sizeof half);
    vu wide = __builtin_convertvector(half, vu) << 16;
    vf v;
    std::memcpy(&v, &wide, sizeof v);
    return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest, ties to even, as torch does; a NaN stays one.
inline void store(bf16* p, vf v) {
    vu bits;
    std::memcpy(&bits, &v, sizeof bits);
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vh half = __builtin_convertvector(v == v ? rounded : vu{} + 0x7fc0u, vh);
    std::memcpy(p, &half, sizeof half);
}

inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    p->bits = uint16_t(bits >> 16);  // only used for numbers that bf16 holds exactly
}

// What the number becomes when it is kept in memory as T: eager torch rounds after every operator.
template <class T>
inline vf rounded(vf v) {
    T kept[LANES];
    store(kept, v);
    return load(kept);
}
template <>
inline vf rounded<float>(vf v) {
    return v;
}

inline float sum(vf v) {
    double total = 0;  // one lane may hold far more than the others
    for (int i = 0; i < LANES; i++) total += v[i];
    return float(total);
}

// exp by Cody and Waite's reduction and the polynomial of Cephes' expf; relative error below 2e-7.
// Results below the smallest normal number become 0, results above the largest one stay at 2.4e38.
inline vf exp(vf x) {
    const vi is_tiny = x < -87.33654f;  // comparisons let a NaN pass
    x = is_tiny ? splat(0.0f) : x;
    x = x > 88.37626f ? splat(88.37626f) : x;
    vf shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2**23: the sum is rounded to an integer
    vf n = shifted - 12582912.0f;
    vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    vi scale = (exponent - 0x4b400000 + 127) << 23;
    vf power;
    std::memcpy(&power, &scale, sizeof power);
    return is_tiny ? splat(0.0f) : p * power;
}
