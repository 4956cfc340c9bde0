// What a draw needs to know of a row of logits, in few passes over them.
//
// Letters: R rows, V vocabulary, B blocks of `block` tokens, W most candidates of a row.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

// Sixteen logits; past the end of the vocabulary there is nothing.
template <class T>
static inline vf read(const T* from, int64_t i, int64_t vocab) {
    if (i + LANES <= vocab) return load(from + i);
    T last[LANES];
    for (auto& each : last) store_one(&each, -INFINITY);
    std::copy(from + i, from + vocab, last);
    return load(last);
}

// exp((x - peak) / heat) of sixteen tokens from the i-th on.
template <class T>
static inline vf weights_at(const T* x, int64_t i, int64_t vocab, float peak, float heat) {
    const vf above = read(x, i, vocab) - peak;
    return exp(heat == 1.0f ? above : above / heat);
}

// The highest entry of a row, NaN if it has any; and exp((x - peak) / heat) summed up over each block to
// mass [B].
template <class T>
static float spread_row(float* mass, const T* x, float heat, int64_t vocab, int64_t block) {
    vf most = splat(-INFINITY);
    vi has_nan = {};
    for (int64_t i = 0; i < vocab; i += LANES) {
        const vf v = read(x, i, vocab);
        most = max(most, v);
        has_nan |= v != v;
    }
    bool is_nan = false;
    for (int i = 0; i < LANES; i++) is_nan |= has_nan[i] != 0;
    const float peak = is_nan ? NAN : highest(most);
    for (int64_t b = 0; b * block < vocab; b++) {
        vf total = {};
        for (int64_t i = b * block; i < std::min(vocab, (b + 1) * block); i += LANES)
            total += weights_at(x, i, vocab, peak, heat);
        mass[b] = sum(total);
    }
    return peak;
}

// Spreads rows of x [R, V] (rows `stride` elements apart) to peak [R] and mass [R, B].
template <class T>
static void spread(float* peak, float* mass, const T* x, int64_t stride, const float* temperature,
                   int64_t rows, int64_t vocab, int64_t block) {
    const int64_t blocks = (vocab + block - 1) / block;
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t r = 0; r < rows; r++)
        peak[r] = spread_row(mass + r * blocks, x + r * stride, temperature[r], vocab, block);
}

// A token drawn by its weight: the first at which the sum of the weights so far, in the order of the
// vocabulary, is above `share` of them all.
struct Pick {
    double token, logprob, peak;
};

// First of `count` entries at which the sum of all so far, from `before` on, is above the target; the last
// that has weight where rounding lifted the target to the total. `before` becomes the sum in front of it.
static inline int64_t find(const float* weights, int64_t count, double target, double& before) {
    int64_t found = 0;
    double total = before;
    for (int64_t i = 0; i < count && total <= target; i++)
        if (weights[i] > 0) {
            found = i, before = total;
            total += weights[i];
        }
    return found;
}

template <class T>
static Pick pick_row(float* mass, const T* x, double share, float heat, int64_t vocab, int64_t block) {
    const float peak = spread_row(mass, x, heat, vocab, block);
    double total = 0, below = 0;
    for (int64_t b = 0; b * block < vocab; b++) total += mass[b];
    const int64_t begin = find(mass, (vocab + block - 1) / block, share * total, below) * block;
    const int64_t end = std::min(vocab, begin + block);
    float* weights = mass;  // of the tokens in the block: the blocks' masses are not needed any more
    for (int64_t i = begin; i < end; i += LANES)
        store(weights + i - begin, weights_at(x, i, vocab, peak, heat));
    const int64_t token = begin + find(weights, end - begin, share * total, below);
    const vf at_token = read(x, token, vocab);
    return {double(token), double(at_token[0] - peak) / heat - std::log(total), peak};
}

// Picks [R] from rows of x [R, V] with shares [R] in [0, 1); see Pick.
template <class T>
static void pick(Pick* picks, const T* x, int64_t stride, const double* share, const float* temperature,
                 int64_t rows, int64_t vocab, int64_t block) {
    const int64_t room = std::max((vocab + block - 1) / block, block);
#pragma omp parallel if (rows > 1)
    {
        std::vector<float> mass(room);
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < rows; r++)
            picks[r] = pick_row(mass.data(), x + r * stride, share[r], temperature[r], vocab, block);
    }
}

// A draw's limits: the top_k most likely tokens (0: all), the most likely ones of mass top_p (0: all).
struct Limit {
    int64_t top_k;
    double top_p;
};

// Tokens and mass at or above each of LEVELS falling thresholds.
constexpr int LEVELS = 8;
struct Census {
    int64_t count[LEVELS];
    double mass[LEVELS];
};

// Blocks whose whole mass is below that of one token at the lowest threshold are passed over.
template <class T>
static Census take_census(const T* x, const float* block_mass, const float* gap, float peak, float heat,
                          int64_t vocab, int64_t block) {
    vf mass[LEVELS] = {};
    vi count[LEVELS] = {};
    const float least = 0.99f * std::exp(-gap[LEVELS - 1]);
    for (int64_t b = 0; b * block < vocab; b++) {
        if (block_mass[b] < least) continue;
        for (int64_t i = b * block; i < std::min(vocab, (b + 1) * block); i += LANES) {
            const vf v = read(x, i, vocab), weight = exp((v - peak) / heat);
            for (int l = 0; l < LEVELS; l++) {
                const vi is_in = (v >= splat(peak - heat * gap[l])) & (v > splat(-INFINITY));
                mass[l] += is_in ? weight : splat(0.0f);
                count[l] -= is_in;  // true is -1
            }
        }
    }
    Census census = {};
    for (int l = 0; l < LEVELS; l++) {
        census.mass[l] = sum(mass[l]);
        for (int i = 0; i < LANES; i++) census.count[l] += count[l][i];
    }
    return census;
}

// Ids of tokens among which are all that the limit keeps, the most likely first and among equals the
// lowest id; returns how many, or -1 where they are more than `most` or the distribution is too flat.
// The threshold is narrowed down by censuses: eight gaps below the peak, then eight between two of them.
template <class T>
static int64_t find_candidates(int64_t* ids, const T* x, const float* block_mass, float peak, float heat,
                               Limit limit, double total, int64_t vocab, int64_t block, int64_t most) {
    if (limit.top_k == 0 && limit.top_p >= 1) return -1;
    const int64_t enough = std::max<int64_t>(64, 2 * limit.top_k);
    float gap[LEVELS] = {0.5f, 1, 2, 3.5f, 5.5f, 8, 11, 15}, low = 0, high = -1;
    for (int pass = 0; pass < 4; pass++) {
        const Census census = take_census(x, block_mass, gap, peak, heat, vocab, block);
        int l = 0;
        // the margin covers the rounding of float32 sums: whoever draws adds up in float64
        while (l < LEVELS && (limit.top_k ? census.count[l] < limit.top_k
                                          : census.mass[l] < limit.top_p * total * (1 + 1e-5)))
            l++;
        if (l == LEVELS) break;  // only in the first pass, or by a hair
        high = gap[l];
        if (l > 0) low = gap[l - 1];
        if (census.count[l] <= enough) break;
        for (int i = 0; i < LEVELS; i++) gap[i] = low + (high - low) * (i + 1) / LEVELS;
    }
    if (high < 0) return -1;
    float lowest = peak - heat * high;
    lowest -= std::abs(lowest) * 1e-6f;  // who is equal after the division by the temperature comes, too
    const float least = 0.99f * std::exp(-high);
    std::vector<std::pair<float, int64_t>> found;
    for (int64_t b = 0; b * block < vocab; b++) {
        if (block_mass[b] < least) continue;
        for (int64_t i = b * block; i < std::min(vocab, (b + 1) * block); i += LANES) {
            const vf v = read(x, i, vocab);
            for (int j = 0; j < LANES; j++)
                if (v[j] >= lowest && v[j] > -INFINITY) found.emplace_back(-v[j], i + j);
        }
        if (int64_t(found.size()) > most) return -1;
    }
    std::sort(found.begin(), found.end());
    for (size_t i = 0; i < found.size(); i++) ids[i] = found[i].second;
    return int64_t(found.size());
}

// For each row of x [R, V]: its candidates to ids [R, W] and their number to counts [R].
template <class T>
static void candidates(int64_t* ids, int64_t* counts, const T* x, int64_t stride, const float* mass,
                       const float* peak, const float* temperature, const double* total, const int64_t* top_k,
                       const double* top_p, int64_t rows, int64_t vocab, int64_t block, int64_t most) {
    const int64_t blocks = (vocab + block - 1) / block;
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t r = 0; r < rows; r++)
        counts[r] = find_candidates(ids + r * most, x + r * stride, mass + r * blocks, peak[r], temperature[r],
                                    Limit{top_k[r], top_p[r]}, total[r], vocab, block, most);
}
