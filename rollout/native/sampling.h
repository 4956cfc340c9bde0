// What a draw needs to know of a row of logits, and the draw, in few passes over them.
//
// Letters: R rows, V vocabulary, B blocks of `block` tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
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

// The highest entry of a row, NaN if it has any, and how many are above -inf.
struct Top {
    float peak;
    int64_t possible;
};

// Besides the top, exp((x - peak) / heat) summed up over each block to mass [B].
template <class T>
static Top spread_row(float* mass, const T* x, float heat, int64_t vocab, int64_t block) {
    vf most = splat(-INFINITY);
    vi has_nan = {}, possible = {};
    for (int64_t i = 0; i < vocab; i += LANES) {
        const vf v = read(x, i, vocab);
        most = max(most, v);
        has_nan |= v != v;
        possible -= v > splat(-INFINITY);  // true is -1
    }
    bool is_nan = false;
    Top top = {0, 0};
    for (int i = 0; i < LANES; i++) {
        is_nan |= has_nan[i] != 0;
        top.possible += possible[i];
    }
    const float peak = top.peak = is_nan ? NAN : highest(most);
    for (int64_t b = 0; b * block < vocab; b++) {
        vf total = {};
        for (int64_t i = b * block; i < std::min(vocab, (b + 1) * block); i += LANES)
            total += weights_at(x, i, vocab, peak, heat);
        mass[b] = sum(total);
    }
    return top;
}

// Spreads rows of x [R, V] (rows `stride` elements apart) to peak [R] and mass [R, B].
template <class T>
static void spread(float* peak, float* mass, const T* x, int64_t stride, const float* temperature,
                   int64_t rows, int64_t vocab, int64_t block) {
    const int64_t blocks = (vocab + block - 1) / block;
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t r = 0; r < rows; r++)
        peak[r] = spread_row(mass + r * blocks, x + r * stride, temperature[r], vocab, block).peak;
}

// What limits a draw: the top_k most likely tokens and those equal to the last (0: no limit), the most likely
// ones of mass top_p (above 1: no limit), those of at least min_p of the most likely one's weight.
struct Limits {
    int64_t top_k;
    double top_p, min_p;

    bool are_none() const { return top_k == 0 && top_p > 1 && min_p <= 0; }
};

// A drawn token, its log_softmax, the log of the mass that the limits keep, the highest logit.
struct Pick {
    double token, logprob, log_kept, peak;
};

// How a row is drawn: the share of the mass, and the rest of its parameters; temperature 0 is greedy.
struct Settings {
    double share, temperature, top_k, top_p, min_p;

    float heat() const { return temperature == 0 ? 1.0f : float(temperature); }
    Limits limits(int64_t vocab) const {
        return {top_k < vocab ? int64_t(top_k) : 0, top_p, min_p};
    }
};

// Logits of a row and what is known of them.
template <class T>
struct Row {
    const T* x;
    float heat;
    int64_t vocab, block;
    float peak = 0;
    int64_t possible = 0;         // tokens above -inf
    double total = 0;             // of exp((x - peak) / heat)
    const float* mass = nullptr;  // of each block

    Pick picked(int64_t token, double log_kept) const {
        const double above = double(read(x, token, vocab)[0] - peak) / heat;
        return {double(token), above - std::log(total), log_kept, peak};
    }
};

// First of `count` entries at which the sum of all so far, from `before` on, is above the target; the last
// that has weight where rounding lifted the target to the total. `before` becomes the sum in front of it.
template <class W>
static inline int64_t find(const W* weights, int64_t count, double target, double& before) {
    int64_t found = 0;
    double total = before;
    for (int64_t i = 0; i < count && total <= target; i++)
        if (weights[i] > 0) {
            found = i, before = total;
            total += weights[i];
        }
    return found;
}

// The first token at which the mass so far, in the order of the vocabulary, is above `share` of it all.
template <class T>
static Pick pick_of_all(const Row<T>& row, double share, float* weights) {
    double below = 0;
    const double target = share * row.total;
    const int64_t blocks = (row.vocab + row.block - 1) / row.block;
    const int64_t begin = find(row.mass, blocks, target, below) * row.block;
    const int64_t end = std::min(row.vocab, begin + row.block);
    for (int64_t i = begin; i < end; i += LANES)
        store(weights + i - begin, weights_at(row.x, i, row.vocab, row.peak, row.heat));
    return row.picked(begin + find(weights, end - begin, target, below), 0);
}

// Logits and ids of some tokens; the logits filled up to whole vectors with -inf.
struct Candidates {
    std::vector<float> values;
    std::vector<int32_t> ids;
    std::vector<double> weights;

    void keep(float value, int64_t id) {
        values.push_back(value);
        ids.push_back(int32_t(id));
    }
    int64_t size() const { return int64_t(ids.size()); }
};

// How far below the peak candidates are sought, times the heat: at last, all that have any weight in float32.
constexpr float FIRST_REACH = 6, LAST_REACH = 88;

// Tokens not more than `reach` below the peak, in the order of the vocabulary. Blocks whose whole mass is
// below that of one such token are passed over.
template <class T>
static void collect(Candidates& found, const Row<T>& row, float reach) {
    found.values.clear();
    found.ids.clear();
    float lowest = row.peak - row.heat * reach;
    lowest -= std::abs(lowest) * 1e-6f;  // who is equal after the division by the heat comes, too
    const float least = 0.9f * std::exp(-reach);
    for (int64_t b = 0; b * row.block < row.vocab; b++) {
        if (row.mass[b] < least) continue;
        for (int64_t i = b * row.block; i < std::min(row.vocab, (b + 1) * row.block); i += LANES) {
            const vf v = read(row.x, i, row.vocab);
            if (!(highest(v) >= lowest)) continue;
            for (int j = 0; j < LANES; j++)
                if (v[j] >= lowest && v[j] > -INFINITY) found.keep(v[j], i + j);
        }
    }
    found.values.resize((found.size() + LANES - 1) / LANES * LANES, -INFINITY);
}

// Tokens and mass at or above each of LEVELS falling thresholds.
constexpr int LEVELS = 8;
struct Census {
    int64_t count[LEVELS];
    double mass[LEVELS];
};

static inline Census take_census(const std::vector<float>& values, const float* gap, float peak, float heat) {
    vf mass[LEVELS] = {};
    vi count[LEVELS] = {};
    for (size_t i = 0; i < values.size(); i += LANES) {
        const vf v = load(&values[i]), weight = exp((v - peak) / heat);
        for (int l = 0; l < LEVELS; l++) {
            const vi is_in = (v >= splat(peak - heat * gap[l])) & (v > splat(-INFINITY));
            mass[l] += is_in ? weight : splat(0.0f);
            count[l] -= is_in;  // true is -1
        }
    }
    Census census = {};
    for (int l = 0; l < LEVELS; l++) {
        census.mass[l] = sum(mass[l]);
        for (int i = 0; i < LANES; i++) census.count[l] += count[l][i];
    }
    return census;
}

// How far below the peak the tokens reach that the limits keep, not much more; -1 where the candidates, which
// are those within `reach`, are not enough. Thresholds close in on it by censuses.
static inline float narrow(const Candidates& found, float reach, float peak, float heat, const Limits& limits,
                           double total) {
    const int64_t enough = std::max<int64_t>(64, 2 * limits.top_k);
    float low = 0, high = -1, gap[LEVELS];
    for (int pass = 0; pass < 4; pass++) {
        const float top = pass == 0 ? reach : high;
        for (int i = 0; i < LEVELS; i++) gap[i] = low + (top - low) * (i + 1) / LEVELS;
        const Census census = take_census(found.values, gap, peak, heat);
        int l = 0;
        // the margin covers the rounding of float32 sums: the draw adds up in float64
        while (l < LEVELS && (limits.top_k ? census.count[l] < limits.top_k
                                           : census.mass[l] < limits.top_p * total * (1 + 1e-5)))
            l++;
        if (l == LEVELS) break;  // only in the first pass, or by a hair
        high = gap[l];
        if (l > 0) low = gap[l - 1];
        if (census.count[l] <= enough) break;
    }
    return high;
}

// Candidates not more than `gap` below the peak, the most likely first and among equals the lowest id, with
// their weights.
static inline void rank(Candidates& found, float gap, float peak, float heat) {
    float lowest = peak - heat * gap;
    lowest -= std::abs(lowest) * 1e-6f;
    std::vector<std::pair<float, int32_t>> order;
    for (int64_t i = 0; i < found.size(); i++)
        if (found.values[i] >= lowest) order.emplace_back(-found.values[i], found.ids[i]);
    std::sort(order.begin(), order.end());
    found.values.assign((order.size() + LANES - 1) / LANES * LANES, -INFINITY);
    found.ids.resize(order.size());
    for (size_t i = 0; i < order.size(); i++) {
        found.values[i] = -order[i].first;
        found.ids[i] = order[i].second;
    }
    found.weights.resize(found.values.size());
    for (size_t i = 0; i < found.values.size(); i += LANES) {
        const vf weight = exp((load(&found.values[i]) - peak) / heat);
        for (int j = 0; j < LANES; j++) found.weights[i + j] = weight[j];
    }
}

// Draws from ranked candidates, among which are all that the limits keep. As in transformers, top-p is of the
// mass that top-k leaves, and ties are those after the division by the heat.
template <class T>
static Pick pick_of_ranked(const Row<T>& row, double share, const Limits& limits, Candidates& found) {
    const int64_t count = found.size();
    const bool is_all = count == row.possible;
    const float kth =
        limits.top_k ? found.values[std::min(limits.top_k, count) - 1] / row.heat : -INFINITY;
    int64_t in_top_k = 0;
    double mass = 0, before = 0, kept = 0;
    while (in_top_k < count && found.values[in_top_k] / row.heat >= kth) mass += found.weights[in_top_k++];
    if (!limits.top_k && !is_all) mass = row.total;
    int64_t end = 0;  // of those that are kept: weights fall
    for (; end < in_top_k && before < limits.top_p * mass && found.weights[end] >= limits.min_p; end++) {
        before += found.weights[end];
        kept += found.weights[end];
    }
    double below = 0;
    const int64_t place = find(found.weights.data(), end, share * kept, below);
    const bool is_cut = end < count || !is_all;
    return row.picked(found.ids[place], is_cut ? std::min(0.0, std::log(kept / row.total)) : 0);
}

// The first token of the highest logit. It is certain: the log of the mass kept is its own.
template <class T>
static Pick pick_highest(const Row<T>& row) {
    int64_t token = 0;
    for (int64_t i = 0; i < row.vocab; i += LANES) {
        const vf v = read(row.x, i, row.vocab);
        if (highest(v) != row.peak) continue;
        while (v[token] != row.peak) token++;
        token += i;
        break;
    }
    Pick pick = row.picked(token, 0);
    pick.log_kept = pick.logprob;
    return pick;
}

template <class T>
static Pick pick_row(Row<T> row, float* mass, float* weights, const Settings& settings, Candidates& found) {
    const double share = settings.share;
    Limits limits = settings.limits(row.vocab);
    const Top top = spread_row(mass, row.x, row.heat, row.vocab, row.block);
    row.peak = top.peak, row.possible = top.possible, row.mass = mass;
    for (int64_t b = 0; b * row.block < row.vocab; b++) row.total += mass[b];
    if (settings.temperature == 0) return pick_highest(row);
    if (limits.are_none() || !std::isfinite(row.peak)) return pick_of_all(row, share, weights);
    limits.top_k = std::min(limits.top_k, row.possible);
    float reach = FIRST_REACH, gap = -1;
    if (limits.top_k == 0 && limits.top_p > 1) {  // a little more than min-p keeps
        reach = gap = std::min(1e-4f - 1.0001f * float(std::log(limits.min_p)), LAST_REACH);
        collect(found, row, reach);
    }
    while (gap < 0) {
        collect(found, row, reach);
        gap = narrow(found, reach, row.peak, row.heat, limits, row.total);
        if (gap < 0 && reach == LAST_REACH) gap = reach;  // what is missing has no weight
        reach = std::min(1.5f * reach, LAST_REACH);
    }
    rank(found, gap, row.peak, row.heat);
    return pick_of_ranked(row, share, limits, found);
}

// Picks [R]: the r-th from row sources[r] of x [L, V], whose rows lie `stride` elements apart.
template <class T>
static void pick(Pick* picks, const T* x, int64_t stride, const int64_t* sources, const Settings* settings,
                 int64_t rows, int64_t vocab, int64_t block) {
#pragma omp parallel if (rows > 1)
    {
        std::vector<float> mass((vocab + block - 1) / block), weights(block);
        Candidates found;
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < rows; r++) {
            const Row<T> row{x + sources[r] * stride, settings[r].heat(), vocab, block};
            picks[r] = pick_row(row, mass.data(), weights.data(), settings[r], found);
        }
    }
}
