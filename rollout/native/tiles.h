// Sums of bf16 products in AMX tiles (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1,
// chapter 18): a tile has 16 rows of 64 bytes, so it holds 16 x 16 sums or 16 rows of 16 units.
#pragma once

#include "panels.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux gives tiles to those processes that ask for them.
static bool ask_for_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
static const bool HAS_TILES = ask_for_tiles();

struct TileSums {
    static constexpr int MOST_ROWS = 16;       // of a block
    static constexpr int BLOCKS = 2;           // at once: 2 x 2 tiles of sums, 2 of inputs, 2 of weights
    // 36 KB of weights stay in the L1 cache of 48 KB: inputs are loaded past it, few sums are put aside
    static constexpr int SHARED_UNITS = 288;
    static constexpr int FETCHING_BLOCKS = 8;  // the first of a chunk fetch the next one among them

    // Tells this thread's tiles their sizes, and gives them up at the end.
    struct Setup {
        explicit Setup(const RowBlocks& in) {
            struct alignas(64) {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t row_bytes[16] = {};
                uint8_t rows[16] = {};
            } config;
            for (int tile = 0; tile < 8; tile++) {
                const bool is_of_weights = tile >= 6;
                config.row_bytes[tile] = LANES * sizeof(unit);
                config.rows[tile] = is_of_weights ? STEP_UNITS : uint8_t(in.height);
            }
            asm volatile("ldtilecfg %0" ::"m"(config));
        }
        ~Setup() { _tile_release(); }
    };

    // sums [count * height, PANEL] += x . weights over `units` of the inner dimension; = where they are new
    static void add(float* sums, bool are_new, const RowBlocks& in, int64_t block, int64_t count,
                    int64_t from, int64_t units, const unit* weights, Ahead ahead) {
        const unit* upper = in.at(block, from);
        if (count == 1) add_blocks<false>(sums, are_new, in, upper, upper, units, weights, ahead);
        else add_blocks<true>(sums, are_new, in, upper, in.at(block + 1, from), units, weights, ahead);
    }

    template <bool TWO>
    static void add_blocks(float* sums, bool are_new, const RowBlocks& in, const unit* upper,
                           const unit* lower, int64_t units, const unit* weights, Ahead ahead) {
        constexpr int64_t PANEL_BYTES = PANEL * sizeof(unit);
        const int64_t row_bytes = in.row_stride * sizeof(unit), step_bytes = ahead.bytes * STEP_UNITS;
        // every address has a name: some compilers' headers take `a + b` for `(const void*)a + b`
        float *lower_sums = sums + in.height * PANEL, *right_sums = sums + LANES;
        float* lower_right_sums = lower_sums + LANES;
        const unit* right = weights + LANES;
        asm volatile("" ::: "memory");  // compilers do not know what the instructions for tiles read
        if (are_new) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, sums, PANEL_BYTES);
            _tile_loadd(1, right_sums, PANEL_BYTES);
            if (TWO) {
                _tile_loadd(2, lower_sums, PANEL_BYTES);
                _tile_loadd(3, lower_right_sums, PANEL_BYTES);
            }
        }
        for (int64_t u = 0; u < units; u += STEP_UNITS) {
            _tile_stream_loadd(4, upper, row_bytes);
            if (TWO) _tile_stream_loadd(5, lower, row_bytes);
            _tile_loadd(6, weights, PANEL_BYTES);
            _tile_loadd(7, right, PANEL_BYTES);
            for (int64_t i = 0; i < step_bytes; i += 64, ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            weights += STEP_UNITS * PANEL;
            right += STEP_UNITS * PANEL;
            upper += STEP_UNITS;
            lower += STEP_UNITS;
        }
        _tile_stored(0, sums, PANEL_BYTES);
        _tile_stored(1, right_sums, PANEL_BYTES);
        if (TWO) {
            _tile_stored(2, lower_sums, PANEL_BYTES);
            _tile_stored(3, lower_right_sums, PANEL_BYTES);
        }
        asm volatile("" ::: "memory");
    }
};
#else
#include "registers.h"

static constexpr bool HAS_TILES = false;
using TileSums = RegisterSums<bf16>;
#endif
