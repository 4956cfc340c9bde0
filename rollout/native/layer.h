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
    void* hidden;                // [T, D] as the layer was given it, and as it gives it
    const void* norm;            // [D]
    const void* attended;        // [T, N * H], rows `attended_stride` elements apart
    const PanelMatrix *attention_out, *gate_up, *down;  // gates and their factors are whole panels
    int64_t tokens, attended_stride;
    float eps;
};

// A layer with all that is the same in every step; `placed` adds the rest.
struct DecodeLayer {
    LayerStart start;
    AttentionCall attention;
    LayerEnd end;
    int64_t group;
};

// Where the rows of a step lie in the layers of one group; see AttentionCall.
struct DecodeRows {
    const int64_t *pages, *seen, *slots;
    int64_t width;
};

struct DecodeStep {
    void* hidden;           // [R, D], given and returned
    const void *cos, *sin;  // [R, H]
    const DecodeRows* groups;
    int64_t rows;
};

// Adds up the time spent in products, with what they do to their results.
template <class T>
struct TimedProducts {
    double seconds = 0;

    void operator()(const Output<T>& out, const T* x, int64_t x_stride, const PanelMatrix& matrix,
                    int64_t rows, NextProduct next) {
        const double started = omp_get_wtime();
        multiply(out, x, x_stride, matrix, rows, next);
        seconds += omp_get_wtime() - started;
    }
};

// Numbers that each half of a layer needs to work in; the end needs more of them than the start.
template <class T>
static int64_t scratch_size(const LayerEnd& call) {
    return std::min(GROUP_ROWS, call.tokens) *
           (spread_stride<T>(call.down->outer) + spread_stride<T>(call.down->inner));
}
template <class T>
static int64_t scratch_size(const LayerStart& call) {
    return std::min(GROUP_ROWS, call.tokens) * spread_stride<T>(call.qkv->inner);
}

template <class T>
static double start_layer(const LayerStart& call, T* normed, const PanelMatrix* next = nullptr) {
    const int64_t D = call.qkv->inner, outer = call.qkv->outer, normed_stride = spread_stride<T>(D);
    TimedProducts<T> product;
    for (int64_t top = 0; top < call.tokens; top += GROUP_ROWS) {
        const int64_t count = std::min(GROUP_ROWS, call.tokens - top), angle = top * call.head_dim;
        T* out = (T*)call.out + top * outer;
        add_rms_norm(normed, normed_stride, (T*)nullptr, (const T*)call.hidden + top * D, (const T*)nullptr,
                     (const T*)call.norm, count, D, call.eps);
        const bool is_last = top + count == call.tokens;
        product({out, outer, Way::REPLACE}, normed, normed_stride, *call.qkv, count,
                {is_last ? next : call.qkv});
        rotate(out, outer, out, outer, (const T*)call.cos + angle, (const T*)call.sin + angle,
               (const T*)call.query_norm, (const T*)call.key_norm, call.head_eps, count,
               call.queries + call.keys, call.queries, call.head_dim);
    }
    return product.seconds;
}

template <class T>
static double end_layer(const LayerEnd& call, T* scratch, const PanelMatrix* next = nullptr) {
    const int64_t D = call.down->outer;
    const int64_t normed_stride = spread_stride<T>(D), gated_stride = spread_stride<T>(call.down->inner);
    T *normed = scratch, *gated = normed + std::min(GROUP_ROWS, call.tokens) * normed_stride;
    TimedProducts<T> product;
    for (int64_t top = 0; top < call.tokens; top += GROUP_ROWS) {
        const int64_t count = std::min(GROUP_ROWS, call.tokens - top);
        T* hidden = (T*)call.hidden + top * D;
        product({hidden, D, Way::ADD}, (const T*)call.attended + top * call.attended_stride,
                call.attended_stride, *call.attention_out, count, {call.gate_up, Way::GATE});
        add_rms_norm(normed, normed_stride, (T*)nullptr, hidden, (const T*)nullptr, (const T*)call.norm,
                     count, D, call.eps);
        product({gated, gated_stride, Way::GATE}, normed, normed_stride, *call.gate_up, count, {call.down});
        const bool is_last = top + count == call.tokens;
        product({hidden, D, Way::ADD}, gated, gated_stride, *call.down, count,
                {is_last ? next : call.attention_out});
    }
    return product.seconds;
}

template <class T>
static DecodeLayer placed(DecodeLayer layer, const DecodeStep& step, T* qkv, T* attended) {
    const DecodeRows& rows = step.groups[layer.group];
    LayerStart& start = layer.start;
    AttentionCall& attention = layer.attention;
    const int64_t stride = start.qkv->outer;
    start.out = qkv, start.hidden = step.hidden, start.cos = step.cos, start.sin = step.sin;
    attention.out = attended, attention.query = qkv;
    attention.key = qkv + start.queries * start.head_dim;
    attention.value = qkv + (start.queries + start.keys) * start.head_dim;
    attention.query_stride = attention.key_stride = attention.value_stride = stride;
    attention.pages = rows.pages, attention.seen = rows.seen, attention.slots = rows.slots;
    attention.width = rows.width;
    layer.end.hidden = step.hidden, layer.end.attended = attended;
    attention.out_stride = layer.end.attended_stride = spread_stride<T>(layer.end.attention_out->inner);
    start.tokens = attention.rows = layer.end.tokens = step.rows;
    return layer;
}

// Adds the seconds of products and of attention to `seconds`.
template <class T>
static void decode_layers(const DecodeLayer* layers, int64_t count, const DecodeStep& step, double* seconds) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        LayerEnd end = layers[i].end;
        end.tokens = step.rows;
        most = std::max(most, scratch_size<T>(end));
    }
    const Scratch<T> scratch(most), qkv(step.rows * layers[0].start.qkv->outer);
    const Scratch<T> attended(step.rows * spread_stride<T>(layers[0].end.attention_out->inner));
    for (int64_t i = 0; i < count; i++) {
        const DecodeLayer layer = placed(layers[i], step, qkv.data, attended.data);
        seconds[0] += start_layer<T>(layer.start, scratch.data, layer.end.attention_out);
        const double started = omp_get_wtime();
        attend_rows<T>(layer.attention, layer.start.head_dim);
        seconds[1] += omp_get_wtime() - started;
        const PanelMatrix* next = i + 1 < count ? layers[i + 1].start.qkv : nullptr;
        seconds[0] += end_layer<T>(layer.end, scratch.data, next);
    }
}
