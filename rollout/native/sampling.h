// What a draw needs to know of a row of logits, in two passes over them.
//
// Letters: R rows, V vocabulary, B blocks of BLOCK tokens.
#pragma once

#include <algorithm>

#include "vectors.h"

// For each row of x [R, V] (rows `stride` elements apart): its highest entry, NaN if it has any, to
// peak [R]; and exp((x - peak) / temperature) summed up over each block to mass [R, B].
template <class T>
static void spread(float* peak, float* mass, const T* x, int64_t stride, const float* temperature,
                   int64_t rows, int64_t vocab, int64_t block) {
    const int64_t blocks = (vocab + block - 1) / block, whole = vocab / LANES * LANES;
    auto read = [&](const T* from, int64_t i) {  // past the end of the vocabulary: nothing
        if (i < whole) return load(from + i);
        T last[LANES];
        for (auto& each : last) store_one(&each, -INFINITY);
        std::copy(from + i, from + vocab, last);
        return load(last);
    };
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        const T* from = x + r * stride;
        vf most = splat(-INFINITY);
        vi has_nan = {};
        for (int64_t i = 0; i < vocab; i += LANES) {
            const vf v = read(from, i);
            most = max(most, v);
            has_nan |= v != v;
        }
        bool is_nan = false;
        for (int i = 0; i < LANES; i++) is_nan |= has_nan[i] != 0;
        const float top = is_nan ? NAN : highest(most);
        peak[r] = top;
        const float heat = temperature[r];
        for (int64_t b = 0; b < blocks; b++) {
            vf total = {};
            for (int64_t i = b * block; i < std::min(vocab, (b + 1) * block); i += LANES)
                total += exp(heat == 1.0f ? read(from, i) - top : (read(from, i) - top) / heat);
            mass[r * blocks + b] = sum(total);
        }
    }
}
