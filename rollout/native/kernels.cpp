// The functions of rollout/native/library.py, called by the rooms beside it. Checked there; here every
// pointer is trusted.
// `kind` says what lies in memory: 0 all float32, 1 all bfloat16, 2 (autocast) bfloat16 outputs of
// linears beside float32 residuals, norms and angles; products and whole layers have no kind 2.

#include "attention.h"
#include "elementwise.h"
#include "noise.h"
#include "sampling.h"

// Products are made here on CPUs with bf16 dot products; elsewhere oneDNN makes them.
#if defined(__AVX512BF16__)
#define HAS_PRODUCTS 1
#include "layer.h"
#else
#define HAS_PRODUCTS 0
#endif

extern "C" {

void rollout_add_rms_norm(int kind, void* out, void* total, const void* x, const void* delta,
                          const void* weight, int64_t tokens, int64_t size, float eps) {
    auto run = [&](auto* x_type, auto* delta_type) {
        using X = std::remove_pointer_t<decltype(x_type)>;
        using D = std::remove_pointer_t<decltype(delta_type)>;
        add_rms_norm((X*)out, size, (X*)total, (const X*)x, (const D*)delta, (const X*)weight, tokens, size,
                     eps);
    };
    if (kind == 0) run((float*)0, (float*)0);
    if (kind == 1) run((bf16*)0, (bf16*)0);
    if (kind == 2) run((float*)0, (bf16*)0);
}

void rollout_rotate(int kind, void* out, const void* x, int64_t stride, const void* cos, const void* sin,
                    const void* query_norm, const void* key_norm, float eps, int64_t tokens, int64_t heads,
                    int64_t queries, int64_t size) {
    auto run = [&](auto* x_type, auto* angle_type) {
        using T = std::remove_pointer_t<decltype(x_type)>;
        using C = std::remove_pointer_t<decltype(angle_type)>;
        rotate((T*)out, heads * size, (const T*)x, stride, (const C*)cos, (const C*)sin, (const C*)query_norm,
               (const C*)key_norm, eps, tokens, heads, queries, size);
    };
    if (kind == 0) run((float*)0, (float*)0);
    if (kind == 1) run((bf16*)0, (bf16*)0);
    if (kind == 2) run((bf16*)0, (float*)0);
}

void rollout_silu_mul(int kind, void* out, const void* gate_up, int64_t tokens, int64_t size) {
    if (kind == 0) silu_mul((float*)out, (const float*)gate_up, tokens, size);
    else silu_mul((bf16*)out, (const bf16*)gate_up, tokens, size);
}

void rollout_store(void* keys, void* values, int64_t head_stride, const void* key, int64_t key_stride,
                   const void* value, int64_t value_stride, const int64_t* slots, int64_t tokens,
                   int64_t heads, int64_t size) {
    store_tokens((char*)keys, (char*)values, head_stride, (const char*)key, key_stride, (const char*)value,
                 value_stride, slots, tokens, heads, size);
}

int rollout_attend(int kind, const AttentionCall* call, int64_t head_dim) {
    return kind == 0 ? attend_rows<float>(*call, head_dim) : attend_rows<bf16>(*call, head_dim);
}

void rollout_spread(int kind, float* peak, float* mass, const void* x, int64_t stride,
                    const float* temperature, int64_t rows, int64_t vocab, int64_t block) {
    if (kind == 0) spread(peak, mass, (const float*)x, stride, temperature, rows, vocab, block);
    else spread(peak, mass, (const bf16*)x, stride, temperature, rows, vocab, block);
}

void rollout_pick(int kind, Pick* picks, const void* x, int64_t stride, const int64_t* sources,
                  const Settings* settings, int64_t rows, int64_t vocab, int64_t block) {
    if (kind == 0) pick(picks, (const float*)x, stride, sources, settings, rows, vocab, block);
    else pick(picks, (const bf16*)x, stride, sources, settings, rows, vocab, block);
}

void rollout_uniforms(double* numbers, const Draw* draws, int64_t count) {
    for (int64_t i = 0; i < count; i++) numbers[i] = uniform(draws[i]);
}

#if HAS_PRODUCTS
int rollout_panel_rows() { return PANEL; }
int rollout_step_units() { return STEP_UNITS; }

void rollout_pack(void* panels, const void* weights, int64_t outer, int64_t units) {
    pack_panels((unit*)panels, (const unit*)weights, outer, units);
}

void rollout_multiply(int kind, void* out, const void* x, const PanelMatrix* matrix, int64_t rows) {
    auto run = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        multiply({(T*)out, matrix->outer, Way::REPLACE}, (const T*)x, matrix->inner, *matrix, rows);
    };
    if (kind == 0) run((float*)0);
    else run((bf16*)0);
}

double rollout_start_layer(int kind, const LayerStart* call) {
    auto run = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        return start_layer(*call, Scratch<T>(scratch_size<T>(*call)).data);
    };
    return kind == 0 ? run((float*)0) : run((bf16*)0);
}

double rollout_end_layer(int kind, const LayerEnd* call) {
    auto run = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        return end_layer(*call, Scratch<T>(scratch_size<T>(*call)).data);
    };
    return kind == 0 ? run((float*)0) : run((bf16*)0);
}

void rollout_decode_layers(int kind, const DecodeLayer* layers, int64_t count, const DecodeStep* step,
                           double* seconds) {
    if (kind == 0) decode_layers<float>(layers, count, *step, seconds);
    else decode_layers<bf16>(layers, count, *step, seconds);
}
#else
int rollout_panel_rows() { return 0; }
int rollout_step_units() { return 0; }
#endif
}
