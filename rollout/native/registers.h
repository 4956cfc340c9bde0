// Sums of products in AVX-512 registers.
#pragma once

#include <immintrin.h>

#include "panels.h"

static inline vi load(const unit* p) {
    vi v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline vf add_products(vf sum, vi weights, vi x, bf16) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
}
static inline vf add_products(vf sum, vi weights, vi x, float) {
    return (vf)_mm512_fmadd_ps((__m512)weights, (__m512)x, (__m512)sum);
}

template <class T>
struct RegisterSums {
    static constexpr int MOST_ROWS = 12;       // of a block: 24 sums and 3 operands in 32 registers
    static constexpr int BLOCKS = 1;           // at once
    static constexpr int SHARED_UNITS = 192;
    static constexpr int FETCHING_BLOCKS = 3;  // the first of a chunk fetch the next one among them
    static constexpr int NEAR_UNITS = 16;      // ahead of the sums, from the L2 cache to the L1

    struct Setup {
        explicit Setup(const RowBlocks&) {}
    };

    // sums [height, PANEL] += x . weights over `units` of the inner dimension; = where they are new
    static void add(float* sums, bool are_new, const RowBlocks& in, int64_t block, int64_t, int64_t from,
                    int64_t units, const unit* weights, Ahead ahead) {
        add_of(in.height, sums, are_new, in.at(block, from), in.row_stride, weights, units, ahead);
    }

    template <int R = MOST_ROWS, class... A>
    static void add_of(int64_t height, A... arguments) {
        if constexpr (R > 0) {
            if (height == R) add_rows<R>(arguments...);
            else add_of<R - 1>(height, arguments...);
        }
    }

    template <int R>
    static void add_rows(float* sums, bool are_new, const unit* x, int64_t row_stride, const unit* weights,
                         int64_t units, Ahead ahead) {
        vf low[R], high[R];
        for (int r = 0; r < R; r++) {
            low[r] = are_new ? vf{} : load(sums + r * PANEL);
            high[r] = are_new ? vf{} : load(sums + r * PANEL + LANES);
        }
        for (int64_t u = 0; u < units; u++, weights += PANEL, ahead.at += ahead.bytes) {
            const vi left = load(weights), right = load(weights + LANES);
            __builtin_prefetch(ahead.at, 0, 2);
            __builtin_prefetch(ahead.at + 64, 0, 2);
            __builtin_prefetch(weights + NEAR_UNITS * PANEL, 0, 3);
            __builtin_prefetch(weights + NEAR_UNITS * PANEL + LANES, 0, 3);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const vi value = vi{} + x[r * row_stride + u];
                low[r] = add_products(low[r], left, value, T());
                high[r] = add_products(high[r], right, value, T());
            }
        }
        for (int r = 0; r < R; r++) {
            store(sums + r * PANEL, low[r]);
            store(sums + r * PANEL + LANES, high[r]);
        }
    }
};
