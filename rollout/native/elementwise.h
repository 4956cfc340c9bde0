// The element-wise parts of a decoder layer, each in one pass and rounded where eager torch rounds.
//
// Letters: T tokens, D hidden size, N heads, H head dim. Rows may lie apart (`stride` elements); the
// last dimension is contiguous, and is a multiple of LANES.
#pragma once

#include "vectors.h"

constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements: less is done sooner than a thread is woken
constexpr int MAX_HEAD_DIM = 1024;

// weight * x / sqrt(mean(x**2) + eps)  (Zhang and Sennrich 2019); kept as X between the two products
template <class X, class W, class O>
static inline void normalize(O* out, const X* x, const W* weight, int64_t size, float eps) {
    vf squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(out + i, load(weight + i) * rounded<X>(load(x + i) * scale));
}

// total = x + delta (where there is a delta), then out = normalize(total)
template <class X, class D>
static void add_rms_norm(X* out, int64_t out_stride, X* total, const X* x, const D* delta, const X* weight,
                         int64_t tokens, int64_t size, float eps) {
#pragma omp parallel for if (tokens * size > PARALLEL_FROM)
    for (int64_t t = 0; t < tokens; t++) {
        const X* from = x + t * size;
        if (delta) {
            for (int64_t i = 0; i < size; i += LANES)
                store(total + t * size + i, load(from + i) + load(delta + t * size + i));
            from = total + t * size;
        }
        normalize(out + t * out_stride, from, weight, size, eps);
    }
}

// Rotary embedding (Su et al. 2021) in the layout of halves: x * cos + rotate_half(x) * sin, after
// the heads' own norms where there are any; the first `queries` heads are queries, the others keys.
// `out` may be `x`.
template <class T, class C>
static void rotate(T* out, int64_t out_stride, const T* x, int64_t stride, const C* cos, const C* sin,
                   const C* query_norm, const C* key_norm, float eps, int64_t tokens, int64_t heads,
                   int64_t queries, int64_t size) {
    const int64_t half = size / 2;
    auto round = [](vf v) { return sizeof(C) < sizeof(float) ? rounded<C>(v) : v; };
#pragma omp parallel for if (tokens * heads * size > PARALLEL_FROM)
    for (int64_t t = 0; t < tokens; t++) {
        T normed[MAX_HEAD_DIM];
        for (int64_t n = 0; n < heads; n++) {
            const T* from = x + t * stride + n * size;
            T* to = out + t * out_stride + n * size;
            if (const C* norm = n < queries ? query_norm : key_norm) {
                normalize(normed, from, norm, size, eps);
                from = normed;
            }
            for (int64_t i = 0; i < half; i += LANES) {
                const vf low = load(from + i), high = load(from + half + i);
                const C *c = cos + t * size + i, *s = sin + t * size + i;
                store(to + i, round(low * load(c)) - round(high * load(s)));
                store(to + half + i, round(high * load(c + half)) + round(low * load(s + half)));
            }
        }
    }
}

// silu(gate) * up
template <class T>
static inline void silu_mul_row(T* out, const T* gate, const T* up, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const vf x = load(gate + i);
        store(out + i, rounded<T>(x / (exp(-x) + 1.0f)) * load(up + i));
    }
}

// silu(gate) * up of [T, 2 * D]: the gates first
template <class T>
static void silu_mul(T* out, const T* gate_up, int64_t tokens, int64_t size) {
#pragma omp parallel for if (tokens * size > PARALLEL_FROM)
    for (int64_t t = 0; t < tokens; t++) {
        const T* gate = gate_up + t * 2 * size;
        silu_mul_row(out + t * size, gate, gate + size, size);
    }
}
