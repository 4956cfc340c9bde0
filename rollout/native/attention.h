// Attention of rows with one query token each straight from the key/value pages: a row's keys are
// scored page by page, the scores go through one softmax in float32, then the values are summed. No
// gather, no padding, no mask, and a row's result depends on nothing but the keys that it sees.
//
// Letters: R rows, K key/value heads, G query heads of each, H head dim, P pages, S slots of a page,
// W width of the page table.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

struct AttentionCall {
    void* out;              // [R, K * G, H], rows `out_stride` elements apart
    const void* query;      // [R, K * G, H], rows `query_stride` elements apart
    void *keys, *values;    // [K, P, S, H]
    const int64_t* pages;   // [R, W]
    const int64_t* seen;    // [R, 2]: the first key seen and the end, counted from the table's start
    const float* sinks;     // [K * G], a logit per head that takes part in the softmax; may be null
    int64_t out_stride, query_stride, head_stride, page_size;
    int64_t rows, width, kv_heads, group;
    float scaling, softcap;  // softcap 0: none
    // the rows' own keys and values [R, K, H], to be stored at slots [R] before any row reads; null where
    // they are there already
    const void *key, *value;
    const int64_t* slots;
    int64_t key_stride, value_stride;
};

// Copies key and value [T, K, H] (tokens a stride apart) to slots [T] of pages [K, P * S, H]; all sizes
// and strides are in bytes.
static inline void store_tokens(char* keys, char* values, int64_t head_stride, const char* key,
                                int64_t key_stride, const char* value, int64_t value_stride,
                                const int64_t* slots, int64_t tokens, int64_t heads, int64_t size) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t n = 0; n < heads; n++) {
            const int64_t at = n * head_stride + slots[t] * size;
            std::memcpy(keys + at, key + t * key_stride + n * size, size);
            std::memcpy(values + at, value + t * value_stride + n * size, size);
        }
}

// Sixteen vectors to the vector of their sixteen sums, in four rounds of adding neighbours.
static inline vf sum_each(vf* v) {
    const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#pragma GCC unroll 4
    for (int count = 8; count > 0; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            vf x = v[2 * i], y = v[2 * i + 1];
            v[i] = __builtin_shuffle(x, y, even) + __builtin_shuffle(x, y, even + 1);
        }
    return v[0];
}

// Scores to softmax weights in place, `count` of them, room for a whole last vector; returns the mass by
// which they are still to be divided: 1 where there is nothing.
static inline float softmax(float* scores, int64_t count, float softcap, const float* sink) {
    if (count == 0 && !sink) return 1;
    const int64_t end = (count + LANES - 1) / LANES * LANES;
    if (softcap > 0)
        for (int64_t i = 0; i < count; i++) scores[i] = softcap * std::tanh(scores[i] / softcap);
    std::fill(scores + count, scores + end, -INFINITY);
    vf most = splat(sink ? *sink : -INFINITY), total = {};
    for (int64_t i = 0; i < end; i += LANES) most = max(most, load(scores + i));  // a NaN stays where it is
    const float peak = highest(most);
    for (int64_t i = 0; i < end; i += LANES) {
        const vf weight = exp(load(scores + i) - peak);  // exactly 0 behind the last score
        store(scores + i, weight);
        total += weight;
    }
    return sum(total) + (sink ? std::exp(*sink - peak) : 0.0f);
}

// Starts to fetch `bytes` of memory. A page's keys and values lie wherever the pool had room, which no
// hardware prefetcher guesses: without this a step waits for memory three quarters of the time.
static inline void fetch(const void* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(at) + i, 0, 2);
}

// A row and a kv head. Neighbours in the rows' order often share their prompt's pages, so a head's rows come
// together.
struct AttentionItem {
    int64_t row, kv_head;

    AttentionItem(const AttentionCall& call, int64_t i) : row(i % call.rows), kv_head(i / call.rows) {}
};

// The items of one thread: about as many keys as those of any other. Which item comes next is known, so that
// its keys can be fetched in time.
struct ItemRange {
    static constexpr int64_t EXTRA_KEYS = 32;  // that the rest of an item takes as long as
    int64_t begin, end;

    explicit ItemRange(const AttentionCall& call)
        : begin(first(call, omp_get_thread_num())), end(first(call, omp_get_thread_num() + 1)) {}

    static int64_t first(const AttentionCall& call, int64_t thread) {
        int64_t head_cost = 0;
        for (int64_t r = 0; r < call.rows; r++) head_cost += cost(call, r);
        int64_t left = head_cost * call.kv_heads * thread / omp_get_num_threads();
        int64_t row = 0;
        const int64_t head = left / head_cost;
        for (left -= head * head_cost; left > 0; row++) left -= cost(call, row);
        return head * call.rows + row;
    }
    static int64_t cost(const AttentionCall& call, int64_t row) {
        return call.seen[2 * row + 1] - call.seen[2 * row] + EXTRA_KEYS;
    }
};

// Puts the key and value of an item in their place.
template <class T, int C>
static inline void store_item(const AttentionCall& call, AttentionItem item) {
    constexpr int64_t H = C * LANES;
    const int64_t row = item.row, kv_head = item.kv_head, at = kv_head * call.head_stride + call.slots[row] * H;
    const T* key = static_cast<const T*>(call.key) + row * call.key_stride + kv_head * H;
    const T* value = static_cast<const T*>(call.value) + row * call.value_stride + kv_head * H;
    std::memcpy(static_cast<T*>(call.keys) + at, key, H * sizeof(T));
    std::memcpy(static_cast<T*>(call.values) + at, value, H * sizeof(T));
}

// One item, Q of its query heads; C = H / LANES. On the way, the keys of `next` are fetched.
template <class T, int C, int Q>
static void attend_heads(const AttentionCall& call, AttentionItem item, AttentionItem next,
                         int64_t first_query, std::vector<float>& scratch) {
    constexpr int64_t H = C * LANES;
    const int64_t row = item.row, kv_head = item.kv_head, S = call.page_size;
    const int64_t head = kv_head * call.group + first_query;
    const int64_t begin = call.seen[2 * row], end = call.seen[2 * row + 1], count = end - begin;
    const int64_t room = (count + 2 * LANES) / LANES * LANES;
    const int64_t* table = call.pages + row * call.width;
    const int64_t* next_table = call.pages + next.row * call.width;
    const T* next_keys = static_cast<const T*>(call.keys) + next.kv_head * call.head_stride;
    const T* keys = static_cast<const T*>(call.keys) + kv_head * call.head_stride;
    const T* values = static_cast<const T*>(call.values) + kv_head * call.head_stride;
    const T* query = static_cast<const T*>(call.query) + row * call.query_stride + head * H;
    T* out = static_cast<T*>(call.out) + row * call.out_stride + head * H;
    if (int64_t(scratch.size()) < room * Q) scratch.resize(room * Q);
    float* scores = scratch.data();

    vf q[Q][C];
    for (int g = 0; g < Q; g++) {
        load_head(q[g], query + g * H);
        for (int c = 0; c < C; c++) q[g][c] *= call.scaling;
    }
    for (int64_t key = begin; key < end;) {
        const int64_t slot = key % S, some = std::min<int64_t>({LANES, S - slot, end - key});
        const int64_t offset = (table[key / S] * S + slot) * H;
        const T* at = keys + offset;
        const T* soon = values + offset;
        vf products[Q][LANES];
        if (some < LANES) std::fill(&products[0][0], &products[Q - 1][LANES], vf{});
        for (int64_t j = 0; j < some; j++, at += H, soon += H) {
            fetch(soon, H * sizeof(T));  // by and by: a core takes only so many at a time
            vf k[C], dot[Q] = {};
            load_head(k, at);
            for (int c = 0; c < C; c++)
                for (int g = 0; g < Q; g++) dot[g] += q[g][c] * k[c];
            for (int g = 0; g < Q; g++) products[g][j] = dot[g];
        }
        for (int g = 0; g < Q; g++) store(scores + g * room + key - begin, sum_each(products[g]));
        key += some;
    }
    float mass[Q];
    for (int g = 0; g < Q; g++)
        mass[g] = softmax(scores + g * room, count, call.softcap,
                          call.sinks ? call.sinks + head + g : nullptr);

    vf sums[Q][C] = {};
    for (int64_t key = begin; key < end;) {
        const int64_t slot = key % S, some = std::min<int64_t>(S - slot, end - key);
        const T* at = values + (table[key / S] * S + slot) * H;
        const T* soon = next_keys + (next_table[key / S] * S + slot) * H;
        for (int64_t j = 0; j < some; j++, key++, at += H, soon += H) {
            fetch(soon, H * sizeof(T));
            vf v[C];
            load_head(v, at);
            for (int c = 0; c < C; c++)
                for (int g = 0; g < Q; g++) sums[g][c] += v[c] * scores[g * room + key - begin];
        }
    }
    for (int g = 0; g < Q; g++) {
        for (int c = 0; c < C; c++) sums[g][c] /= mass[g];
        store_head(out + g * H, sums[g]);
    }
}

template <class T, int C>
static void attend(const AttentionCall& call) {
    const int64_t items = call.rows * call.kv_heads;
    if (items == 0) return;
#pragma omp parallel if (items > 2)
    {
        std::vector<float> scratch;
        const ItemRange own(call);
        if (call.slots) {
            for (int64_t i = own.begin; i < own.end; i++) store_item<T, C>(call, AttentionItem(call, i));
#pragma omp barrier  // rows may be tokens of one prompt, which see each other
        }
        for (int64_t i = own.begin; i < own.end; i++) {
            const AttentionItem item(call, i), next(call, std::min(i + 1, own.end - 1));
            int64_t done = 0;
            // as many query heads at once as keep their sums in registers
            constexpr int MOST = C <= 4 ? 4 : 2;
            while (done < call.group) {
                const int64_t left = std::min<int64_t>(call.group - done, MOST);
                if (left >= 4) attend_heads<T, C, std::min(MOST, 4)>(call, item, next, done, scratch);
                else if (left == 3) attend_heads<T, C, std::min(MOST, 3)>(call, item, next, done, scratch);
                else if (left == 2) attend_heads<T, C, 2>(call, item, next, done, scratch);
                else attend_heads<T, C, 1>(call, item, next, done, scratch);
                done += left;
            }
        }
    }
}

// Returns false for a head dim that there is no code for.
template <class T>
static bool attend_rows(const AttentionCall& call, int64_t head_dim) {
    switch (head_dim) {
        case 16: attend<T, 1>(call); return true;
        case 32: attend<T, 2>(call); return true;
        case 64: attend<T, 4>(call); return true;
        case 80: attend<T, 5>(call); return true;
        case 96: attend<T, 6>(call); return true;
        case 128: attend<T, 8>(call); return true;
        case 256: attend<T, 16>(call); return true;
    }
    return false;
}
