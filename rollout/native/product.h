// Products of rows with a weight matrix in panels, on CPUs with AVX-512 and its bf16 dot products.
//
// The scheme of Goto and van de Geijn (2008): a tile of up to MOST_ROWS x PANEL sums stays in registers
// while a panel of the weights streams by. Sums are float32 and rounded once. Each is taken in the order
// of the inner dimension, so a row's result does not depend on the rows beside it.
//
// A unit is four bytes of the inner dimension: one float32 or two bf16. Letters: O outer size, I inner
// size, U units of a row.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <memory>

#include "vectors.h"

struct PanelMatrix {
    const void* panels;  // [ceil(O / PANEL), U, PANEL] units, zeros behind the last row of the weights
    const void* bias;    // [panels * PANEL] or null
    int64_t inner, outer;
};

constexpr int PANEL = 2 * LANES;    // weight rows
constexpr int MOST_ROWS = 12;       // of a tile: 24 sums and 3 operands in 32 registers
constexpr int64_t GROUP_ROWS = 192; // worked on before the next ones: their inputs stay in the L2 cache
constexpr int CHUNK_UNITS = 1024;   // of a panel at once: 128 KB, so that this and the next are in L2
constexpr int FETCHING_TILES = 3;   // the first tiles of a chunk fetch the next one among them
constexpr int NEAR_UNITS = 16;      // ahead of the sums, from the L2 cache to the L1
constexpr int CLASHING_UNITS = 512, MOST_CLASHING_ROWS = 6;  // of a cache of 8 ways of 4 KB
constexpr int64_t PARALLEL_PRODUCTS = 1 << 16;

typedef int32_t unit;

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

// sums [R, PANEL] += x . weights over `units`; x and its rows `row_stride` units apart. On the way, `stride`
// bytes of memory after `ahead` are fetched for each unit.
template <class T, int R>
static void add_tile(float* sums, const unit* x, int64_t row_stride, const unit* weights, int64_t units,
                     const char* ahead, int64_t stride) {
    vf low[R], high[R];
    for (int r = 0; r < R; r++) {
        low[r] = load(sums + r * PANEL);
        high[r] = load(sums + r * PANEL + LANES);
    }
    for (int64_t u = 0; u < units; u++, weights += PANEL, ahead += stride) {
        const vi left = load(weights), right = load(weights + LANES);
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + 64, 0, 2);
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

template <class T, int R = MOST_ROWS, class... A>
static void add_tile_of(int64_t rows, A... arguments) {
    if constexpr (R > 0) {
        if (rows == R) add_tile<T, R>(arguments...);
        else add_tile_of<T, R - 1>(rows, arguments...);
    }
}

// Rows of inputs, some of a product's, in tiles of nearly one height.
struct TileRows {
    const unit* x;
    int64_t rows, row_stride, units, count;

    int64_t begin(int64_t tile) const { return rows * tile / count; }
};

// out [rows of the tiles from `first` to `end`, columns of one panel]
template <class T>
static void multiply_panel(T* out, const TileRows& in, int64_t first, int64_t end, const PanelMatrix& matrix,
                           int64_t panel) {
    alignas(64) float sums[GROUP_ROWS * PANEL];
    const int64_t top = in.begin(first), rows = in.begin(end) - top, column = panel * PANEL;
    const unit* weights = static_cast<const unit*>(matrix.panels) + panel * in.units * PANEL;
    const T* bias = static_cast<const T*>(matrix.bias);
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < PANEL; i += LANES)
            store(sums + r * PANEL + i, bias ? load(bias + column + i) : vf{});
    for (int64_t from = 0; from < in.units; from += CHUNK_UNITS) {
        const int64_t units = std::min<int64_t>(CHUNK_UNITS, in.units - from);
        const unit* chunk = weights + from * PANEL;
        const char* next = reinterpret_cast<const char*>(chunk + units * PANEL);
        const int64_t fetching = std::min<int64_t>(end - first, FETCHING_TILES);
        for (int64_t tile = first; tile < end; tile++) {
            const int64_t part = tile - first, row = in.begin(tile);
            const bool fetches = part < fetching;
            const int64_t stride = fetches ? PANEL * sizeof(unit) / fetching : 0;
            add_tile_of<T>(in.begin(tile + 1) - row, sums + (row - top) * PANEL,
                           in.x + row * in.row_stride + from, in.row_stride, chunk, units,
                           fetches ? next + part * stride * units : next, stride);
        }
    }
    const int64_t width = std::min<int64_t>(PANEL, matrix.outer - column);
    for (int64_t r = 0; r < rows; r++) {
        T row[PANEL];
        for (int i = 0; i < PANEL; i += LANES) store(row + i, load(sums + r * PANEL + i));
        std::memcpy(out + (top + r) * matrix.outer + column, row, width * sizeof(T));
    }
}

// Weights [O, I], rows contiguous, to panels; see PanelMatrix.
static inline void pack_panels(unit* panels, const unit* weights, int64_t outer, int64_t units) {
    const int64_t count = (outer + PANEL - 1) / PANEL;
#pragma omp parallel for if (outer * units > PARALLEL_PRODUCTS)
    for (int64_t p = 0; p < count; p++) {
        const unit* from = weights + p * PANEL * units;
        const int64_t rows = std::min<int64_t>(PANEL, outer - p * PANEL);
        for (int64_t u = 0; u < units; u++) {
            unit* to = panels + (p * units + u) * PANEL;
            for (int64_t r = 0; r < PANEL; r++) to[r] = r < rows ? from[r * units + u] : 0;
        }
    }
}

// out [rows, O] = x [rows, I] . weights^T + bias
template <class T>
static void multiply(T* out, const T* x, const PanelMatrix& matrix, int64_t rows) {
    const int64_t units = matrix.inner * sizeof(T) / sizeof(unit);
    const int64_t panels = (matrix.outer + PANEL - 1) / PANEL;
    // rows of a tile that lie a power of two apart would push each other out of the L1 cache
    const bool is_copied = rows > MOST_CLASHING_ROWS && units % CLASHING_UNITS == 0;
    const int64_t row_stride = is_copied ? units + LANES : units;
    const int64_t room = is_copied ? std::min(rows, GROUP_ROWS) * row_stride : 0;
    const std::unique_ptr<unit[]> copies(new unit[room]);
#pragma omp parallel if (rows * matrix.inner * matrix.outer > PARALLEL_PRODUCTS)
    for (int64_t top = 0; top < rows; top += GROUP_ROWS) {
        const unit* group = reinterpret_cast<const unit*>(x) + top * units;
        const int64_t count = std::min(GROUP_ROWS, rows - top);
        if (is_copied) {
#pragma omp for
            for (int64_t r = 0; r < count; r++)
                std::memcpy(&copies[r * row_stride], group + r * units, units * sizeof(unit));
        }
        const TileRows in{is_copied ? copies.get() : group, count, row_stride, units,
                          (count + MOST_ROWS - 1) / MOST_ROWS};
        // a thread takes whole panels; only where they are too few, the rows are divided, too
        const int64_t parts = std::clamp<int64_t>(4 * omp_get_num_threads() / panels, 1, in.count);
#pragma omp for
        for (int64_t i = 0; i < parts * panels; i++) {
            const int64_t part = i / panels;
            multiply_panel(out + top * matrix.outer, in, in.count * part / parts,
                           in.count * (part + 1) / parts, matrix, i % panels);
        }
    }
}
