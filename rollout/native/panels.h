// Weights in the order in which products read them, and the rows that they are multiplied with.
//
// A unit is four bytes of the inner dimension: one float32 or two bf16. Letters: O outer size, I inner
// size, U units of a row, filled up to whole steps.
#pragma once

#include <algorithm>
#include <new>

#include "vectors.h"

typedef int32_t unit;

constexpr int PANEL = 2 * LANES;  // weight rows
constexpr int STEP_UNITS = 16;    // of a row, taken at once by a tile
constexpr int64_t PARALLEL_PRODUCTS = 1 << 16;
static_assert(STEP_UNITS % LANES == 0 && PANEL % LANES == 0);

static inline int64_t whole_steps(int64_t units) {
    return (units + STEP_UNITS - 1) / STEP_UNITS * STEP_UNITS;
}

// Numbers from row to row, at least `size`, where rows are read side by side: an odd number of cache lines,
// so that they spread over all sets of the caches (tiles, rows of 576 bf16: 1.3 times as fast as rows without
// a gap, 1,536: 1.2 times).
template <class T>
static inline int64_t spread_stride(int64_t size) {
    constexpr int64_t LINE = 64 / sizeof(T);
    return ((size + LINE - 1) / LINE | 1) * LINE;
}

struct PanelMatrix {
    const void* panels;  // [ceil(O / PANEL), U, PANEL] units, zeros where the weights have ended
    const void* bias;    // [panels * PANEL] or null
    int64_t inner, outer;

    int64_t num_panels() const { return (outer + PANEL - 1) / PANEL; }

    template <class T>
    int64_t row_units() const {
        return inner * sizeof(T) / sizeof(unit);
    }
    template <class T>
    const unit* panel(int64_t i) const {
        return static_cast<const unit*>(panels) + i * whole_steps(row_units<T>()) * PANEL;
    }
};

// Swaps the columns that have bit S with those of the row S further on that have not.
template <int S>
static inline void swap_columns(vi (&rows)[LANES]) {
    vi upper, lower;
    for (int c = 0; c < LANES; c++) {
        upper[c] = c & S ? LANES + c - S : c;
        lower[c] = c & S ? LANES + c : c + S;
    }
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) {
        if (r & S) continue;
        const vi one = rows[r], other = rows[r + S];
        rows[r] = __builtin_shuffle(one, other, upper);
        rows[r + S] = __builtin_shuffle(one, other, lower);
    }
}

// So many weight rows and units, `stride` units from row to row, turned to a panel; zeros for what is
// missing.
static inline void pack_block(unit* panel, const unit* weights, int64_t stride, int64_t rows, int64_t units) {
    vi block[LANES] = {};
    if (rows >= LANES && units >= LANES) {
        for (int r = 0; r < LANES; r++) std::memcpy(&block[r], weights + r * stride, sizeof block[r]);
    } else {
        for (int64_t r = 0; r < std::min<int64_t>(rows, LANES); r++)
            std::memcpy(&block[r], weights + r * stride, std::min<int64_t>(units, LANES) * sizeof(unit));
    }
    swap_columns<1>(block);
    swap_columns<2>(block);
    swap_columns<4>(block);
    swap_columns<8>(block);
    for (int u = 0; u < LANES; u++) std::memcpy(panel + u * PANEL, &block[u], sizeof block[u]);
}

// Weights [O, I], rows contiguous, to panels; see PanelMatrix.
static inline void pack_panels(unit* panels, const unit* weights, int64_t outer, int64_t row_units) {
    const int64_t count = (outer + PANEL - 1) / PANEL, units = whole_steps(row_units);
#pragma omp parallel for if (outer * units > PARALLEL_PRODUCTS)
    for (int64_t p = 0; p < count; p++)
        for (int64_t u = 0; u < units; u += LANES)
            for (int64_t r = 0; r < PANEL; r += LANES)
                pack_block(panels + (p * units + u) * PANEL + r, weights + (p * PANEL + r) * row_units + u,
                           row_units, outer - p * PANEL - r, row_units - u);
}

// Rows of inputs, some of a product's, in blocks of one height, of which the last may begin before the one
// in front of it ends.
struct RowBlocks {
    const unit* x;
    int64_t rows, row_stride, units, count, height;

    RowBlocks(const unit* x, int64_t rows, int64_t row_stride, int64_t units, int64_t most_rows)
        : x(x), rows(rows), row_stride(row_stride), units(units), count((rows + most_rows - 1) / most_rows),
          height((rows + count - 1) / count) {}

    int64_t begin(int64_t block) const { return std::min(block * height, rows - height); }
    const unit* at(int64_t block, int64_t unit) const { return x + begin(block) * row_stride + unit; }
};

// Memory to fetch meanwhile: so many bytes for each unit.
struct Ahead {
    const char* at;
    int64_t bytes;
};

// Uninitialized memory that begins at a cache line.
template <class T>
struct Scratch {
    T* data;

    explicit Scratch(int64_t size)
        : data(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t(64)))) {}
    ~Scratch() { ::operator delete(data, std::align_val_t(64)); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};
