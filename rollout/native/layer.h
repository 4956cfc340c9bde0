// A decoder layer in two calls, one up to its attention and one from there on: norms, products, rotary
// embedding and the gated MLP one after the other. Both return the seconds that their products took.
// Where every row has one token, all layers of a model may be one call.
//
// Letters: T tokens, D hidden size, N query heads, K key/value heads, H head dim, M the MLP's inner size.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "product.h"

struct LayerStart {
    void* out;                // [T, (N + 2 * K) * H]: queries and keys rotated, values
    const void *hidden, *norm;  // [T, D], [D]
    const PanelMatrix* qkv;
    const void *cos, *sin;    // [T, H]
    const void *query_norm, *key_norm;  // [H] or null
    int64_t tokens, queries, keys, head_dim;
    float eps, head_eps;
};

struct LayerEnd {
    void* out;                   // [T, D], may be `hidden`
    const void *hidden, *norm;   // [T, D] as the layer was given it, [D]
    const void* attended;        // [T, N * H]
    const PanelMatrix *attention_out, *gate_up, *down;
    int64_t tokens;
    float eps;
};

struct DecodeLayer {
    LayerStart start;
    AttentionCall attention;
    LayerEnd end;
};

// Adds up the time spent in products.
template <class T>
struct TimedProducts {
    double seconds = 0;

    void operator()(T* out, const T* x, const PanelMatrix& matrix, int64_t rows) {
        const double started = omp_get_wtime();
        multiply(out, x, matrix, rows);
        seconds += omp_get_wtime() - started;
    }
};

template <class T>
static double start_layer(const LayerStart& call) {
    const int64_t D = call.qkv->inner, outer = call.qkv->outer;
    const int64_t most = std::min(GROUP_ROWS, call.tokens);
    const Scratch<T> normed(most * D);
    TimedProducts<T> product;
    for (int64_t top = 0; top < call.tokens; top += GROUP_ROWS) {
        const int64_t count = std::min(GROUP_ROWS, call.tokens - top), angle = top * call.head_dim;
        T* out = (T*)call.out + top * outer;
        add_rms_norm(normed.data, (T*)nullptr, (const T*)call.hidden + top * D, (const T*)nullptr,
                     (const T*)call.norm, count, D, call.eps);
        product(out, normed.data, *call.qkv, count);
        rotate(out, outer, out, outer, (const T*)call.cos + angle, (const T*)call.sin + angle,
               (const T*)call.query_norm, (const T*)call.key_norm, call.head_eps, count,
               call.queries + call.keys, call.queries, call.head_dim);
    }
    return product.seconds;
}

template <class T>
static double end_layer(const LayerEnd& call) {
    const int64_t D = call.down->outer, M = call.down->inner, attended_size = call.attention_out->inner;
    const int64_t most = std::min(GROUP_ROWS, call.tokens);
    const Scratch<T> scratch(most * (2 * D + 3 * M));
    T *delta = scratch.data, *normed = delta + most * D, *gate_up = normed + most * D;
    T* gated = gate_up + most * 2 * M;
    TimedProducts<T> product;
    for (int64_t top = 0; top < call.tokens; top += GROUP_ROWS) {
        const int64_t count = std::min(GROUP_ROWS, call.tokens - top);
        T* out = (T*)call.out + top * D;
        product(delta, (const T*)call.attended + top * attended_size, *call.attention_out, count);
        add_rms_norm(normed, out, (const T*)call.hidden + top * D, delta, (const T*)call.norm, count, D,
                     call.eps);
        product(gate_up, normed, *call.gate_up, count);
        silu_mul(gated, gate_up, count, M);
        product(delta, gated, *call.down, count);
        add(out, delta, count * D);
    }
    return product.seconds;
}

// Adds the seconds of products and of attention to `seconds`.
template <class T>
static void decode_layers(const DecodeLayer* layers, int64_t count, double* seconds) {
    for (int64_t i = 0; i < count; i++) {
        seconds[0] += start_layer<T>(layers[i].start);
        const double started = omp_get_wtime();
        attend_rows<T>(layers[i].attention, layers[i].start.head_dim);
        seconds[1] += omp_get_wtime() - started;
        seconds[0] += end_layer<T>(layers[i].end);
    }
}
