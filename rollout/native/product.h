// Products of rows with a weight matrix in panels, on CPUs with AVX-512 and its bf16 dot products.
//
// The scheme of Goto and van de Geijn (2008): the sums of some rows and a panel of weight rows stay in
// registers while the panel streams by; bf16 sums stay in AMX tiles where there are any (tiles.h). Sums are
// float32 and rounded once. Each is taken in the order of the inner dimension and in the same way whatever
// the number of rows, so a row's result does not depend on the rows beside it.
#pragma once

#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "elementwise.h"
#include "panels.h"
#include "registers.h"
#include "tiles.h"

constexpr int64_t GROUP_ROWS = 192;  // worked on before the next ones: their inputs stay in the L2 cache
constexpr int CHUNK_UNITS = 1024;    // of a panel at once: 128 KB, so that this and the next are in L2
// Where blocks of rows take a panel's units in turn, they take Sums::SHARED_UNITS at once: these stay in L1.
// More rows than so many, so far apart, push each other out of an L1 cache of 8 ways of 4 KB, so are copied.
constexpr int MOST_CLASHING_ROWS = 6, CLASHING_UNITS = 512;

enum class Way {
    REPLACE,  // out = product
    ADD,      // out += product, rounded before it is added
    GATE,     // out = silu(first half of the product) * second half, each rounded before
};

// The matrix of the following product, and its way; null where that is not known.
struct NextProduct {
    const PanelMatrix* matrix = nullptr;
    Way way = Way::REPLACE;
};

// Where the rows of a product go, `stride` numbers apart.
template <class T>
struct Output {
    T* rows;
    int64_t stride;
    Way way;

    Output from(int64_t row, int64_t column) const { return {rows + row * stride + column, stride, way}; }
};

// Sums [rows, PANEL] plus a bias [PANEL] or null to out, `width` of each.
template <class T>
static inline void write_sums(Output<T> out, const float* sums, int64_t rows, const T* bias,
                              int64_t width) {
    const bool adds = out.way == Way::ADD;
    const vf low = bias ? load(bias) : vf{}, high = bias ? load(bias + LANES) : vf{};
    for (int64_t r = 0; r < rows; r++, sums += PANEL, out.rows += out.stride) {
        T last[PANEL], *to = width == PANEL ? out.rows : last;
        if (adds && to == last) std::memcpy(last, out.rows, width * sizeof(T));
        const vf left = load(sums) + low, right = load(sums + LANES) + high;
        store(to, adds ? load(to) + rounded<T>(left) : left);
        store(to + LANES, adds ? load(to + LANES) + rounded<T>(right) : right);
        if (to == last) std::memcpy(out.rows, last, width * sizeof(T));
    }
}

// Columns of one panel, with which `out` begins, and rows of the blocks from `first` to `end`. While one
// chunk of the panel is multiplied, the following one is fetched, at last what `next` begins with.
template <class T, class Sums>
static void multiply_panel(const Output<T>& out, const RowBlocks& in, int64_t first, int64_t end,
                           const PanelMatrix& matrix, int64_t panel, const unit* next) {
    alignas(64) float sums[GROUP_ROWS * PANEL];  // [end - first, height, PANEL]
    const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, matrix.outer - column);
    const unit* weights = matrix.panel<T>(panel);
    const T* bias = matrix.bias ? static_cast<const T*>(matrix.bias) + column : nullptr;
    const int64_t fetching = std::min<int64_t>(end - first, Sums::FETCHING_BLOCKS);
    static_assert(CHUNK_UNITS % STEP_UNITS == 0 && Sums::SHARED_UNITS % STEP_UNITS == 0);
    const int64_t most_units = end - first > Sums::BLOCKS ? Sums::SHARED_UNITS : CHUNK_UNITS;
    // of equal sizes, since a chunk fetches as much as it has itself
    const int64_t chunks = (in.units + most_units - 1) / most_units;
    const int64_t chunk_units = whole_steps((in.units + chunks - 1) / chunks);
    for (int64_t from = 0; from < in.units; from += chunk_units) {
        const int64_t units = std::min<int64_t>(chunk_units, in.units - from);
        const bool is_new = from == 0, is_done = from + units == in.units;
        const unit *chunk = weights + from * PANEL, *ahead = is_done ? next : chunk + units * PANEL;
        for (int64_t block = first; block < end; block += Sums::BLOCKS) {
            const int64_t part = block - first, count = std::min<int64_t>(Sums::BLOCKS, end - block);
            const int64_t share = part < fetching ? PANEL * sizeof(unit) * count / fetching : 0;
            // sums that are finished at once always lie in the same place, so in the L1 cache
            float* of_block = sums + (is_new && is_done ? 0 : part * in.height * PANEL);
            Sums::add(of_block, is_new, in, block, count, from, units, chunk,
                      Ahead{reinterpret_cast<const char*>(ahead) + part * share / count * units, share});
            for (int64_t b = block; is_done && b < block + count; b++) {
                const int64_t row = b * in.height, of_b = (b - block) * in.height + row - in.begin(b);
                write_sums(out.from(row, 0), of_block + of_b * PANEL, std::min(in.height, in.rows - row),
                           bias, width);
            }
        }
    }
}

// A panel of gates, the one of the same columns' factors, and what they make: never in memory as a whole.
template <class T, class Sums>
static void multiply_gated_panel(const Output<T>& out, const RowBlocks& in, int64_t first, int64_t end,
                                 const PanelMatrix& matrix, int64_t panel, const unit* next) {
    alignas(64) T gates[GROUP_ROWS * PANEL], factors[GROUP_ROWS * PANEL];
    const int64_t of_factors = panel + matrix.num_panels() / 2;
    const Output<T> to_gates{gates, PANEL, Way::REPLACE}, to_factors{factors, PANEL, Way::REPLACE};
    multiply_panel<T, Sums>(to_gates, in, first, end, matrix, panel, matrix.panel<T>(of_factors));
    multiply_panel<T, Sums>(to_factors, in, first, end, matrix, of_factors, next);
    const int64_t last = std::min(end * in.height, in.rows);
    for (int64_t r = first * in.height; r < last; r++)
        silu_mul_row(out.from(r, 0).rows, gates + r * PANEL, factors + r * PANEL, PANEL);
}

// Panels that a product takes one after the other: those of gates bring their factors along.
static inline int64_t panels_in_turn(const PanelMatrix& matrix, Way way) {
    return way == Way::GATE ? matrix.num_panels() / 2 : matrix.num_panels();
}

// Of `count` panels one after the other, those of one thread.
struct PanelRange {
    int64_t begin, end;

    explicit PanelRange(int64_t count)
        : begin(count * omp_get_thread_num() / omp_get_num_threads()),
          end(count * (omp_get_thread_num() + 1) / omp_get_num_threads()) {}
};

template <class T, class Sums>
static void multiply_with(const Output<T>& out, const T* x, int64_t x_stride, const PanelMatrix& matrix,
                          int64_t rows, NextProduct next) {
    const int64_t row_units = matrix.row_units<T>(), units = whole_steps(row_units);
    const int64_t panels = panels_in_turn(matrix, out.way);
    const int64_t given_stride = x_stride * sizeof(T) / sizeof(unit);
    const bool is_copied =
        units != row_units || (rows > MOST_CLASHING_ROWS && given_stride % CLASHING_UNITS == 0);
    const int64_t row_stride = is_copied ? spread_stride<unit>(units) : given_stride;
    const Scratch<unit> copies(is_copied ? std::min(rows, GROUP_ROWS) * row_stride : 0);
#pragma omp parallel if (rows * matrix.inner * matrix.outer > PARALLEL_PRODUCTS)
    for (int64_t top = 0; top < rows; top += GROUP_ROWS) {
        const unit* group = reinterpret_cast<const unit*>(x) + top * given_stride;
        const int64_t count = std::min(GROUP_ROWS, rows - top);
        if (is_copied) {
#pragma omp for
            for (int64_t r = 0; r < count; r++) {
                unit* row = copies.data + r * row_stride;
                std::memcpy(row, group + r * given_stride, row_units * sizeof(unit));
                std::fill(row + row_units, row + units, 0);
            }
        }
        const RowBlocks in(is_copied ? copies.data : group, count, row_stride, units, Sums::MOST_ROWS);
        const typename Sums::Setup setup(in);
        // a thread takes whole panels; only where they are too few, the rows are divided, too
        const int64_t parts = std::clamp<int64_t>(4 * omp_get_num_threads() / panels, 1, in.count);
        const PanelRange own(parts * panels);
        for (int64_t i = own.begin; i < own.end; i++) {
            const int64_t part = i / panels, panel = i % panels;
            const unit* ahead = matrix.panel<T>(panel + 1);
            if (i + 1 == own.end && next.matrix)
                ahead = next.matrix->panel<T>(PanelRange(panels_in_turn(*next.matrix, next.way)).begin);
            const int64_t first = in.count * part / parts, end = in.count * (part + 1) / parts;
            const Output<T> to = out.from(top, panel * PANEL);
            if (out.way == Way::GATE) multiply_gated_panel<T, Sums>(to, in, first, end, matrix, panel, ahead);
            else multiply_panel<T, Sums>(to, in, first, end, matrix, panel, ahead);
        }
#pragma omp barrier
    }
}

// x [rows, I] . weights^T + bias to out, the rows of x `x_stride` numbers apart. The first panels of `next`,
// which comes after this matrix, are fetched at the end. Halves that gate each other are whole panels.
template <class T>
static void multiply(const Output<T>& out, const T* x, int64_t x_stride, const PanelMatrix& matrix,
                     int64_t rows, NextProduct next = {}) {
    if constexpr (std::is_same_v<T, bf16>)
        if (HAS_TILES) return multiply_with<T, TileSums>(out, x, x_stride, matrix, rows, next);
    multiply_with<T, RegisterSums<T>>(out, x, x_stride, matrix, rows, next);
}
