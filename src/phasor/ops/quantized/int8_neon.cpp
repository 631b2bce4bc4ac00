// y = x W^T with W in 8 bits and x rounded to 8 bits, for ARM processors with dot products of 8-bit integers.
//
// Every 64 inputs of a row of x share a scale, or every 32 where 64 do not divide them. Their sum of
// products is exact, in 32-bit integers.

#include <arm_neon.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace {

using torch::stable::Tensor;

constexpr int64_t OUTPUTS = 2, ROWS = 4;   // of a block
constexpr int64_t MIN_PRODUCTS = 1 << 17;  // with fewer, starting threads takes longer than it saves

template <int CHUNK>
struct Rounded {  // inputs of a row
    int8_t values[CHUNK];
    float scale;
};

template <int CHUNK>
void round_row(const float* x, Rounded<CHUNK>* out, int64_t chunks) {
    for (int64_t c = 0; c < chunks; c++, x += CHUNK, out++) {
        float32x4_t most = vabsq_f32(vld1q_f32(x));
        for (int i = 4; i < CHUNK; i += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + i)));
        const float largest = vmaxvq_f32(most);  // NaN where an input is
        const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        for (int i = 0; i < CHUNK; i += 8) {
            const int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), inverse));
            const int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4), inverse));
            vst1_s8(out->values + i, vmovn_s16(vcombine_s16(vmovn_s32(a), vmovn_s32(b))));
        }
        out->scale = largest / 127.0f;
    }
}

// O outputs for R rows.
template <int CHUNK, int O, int R>
void multiply_block(const Rounded<CHUNK>* x, const int8_t* weights, const float* scales, float* y, int64_t chunks,
                    int64_t outputs) {
    float32x4_t acc[O][R];
    for (int o = 0; o < O; o++)
        for (int r = 0; r < R; r++) acc[o][r] = vdupq_n_f32(0);
    for (int64_t c = 0; c < chunks; c++) {
        for (int o = 0; o < O; o++) {
            int8x16_t w[CHUNK / 16];
            for (int i = 0; i < CHUNK / 16; i++) w[i] = vld1q_s8(weights + (o * chunks + c) * CHUNK + 16 * i);
            for (int r = 0; r < R; r++) {
                const Rounded<CHUNK>& a = x[r * chunks + c];
                int32x4_t sum = vdupq_n_s32(0);
                for (int i = 0; i < CHUNK / 16; i++) sum = vdotq_s32(sum, w[i], vld1q_s8(a.values + 16 * i));
                acc[o][r] = vfmaq_n_f32(acc[o][r], vcvtq_f32_s32(sum), a.scale);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int o = 0; o < O; o++) y[r * outputs + o] = vaddvq_f32(acc[o][r]) * scales[o];
}

// O outputs for all rows.
template <int CHUNK, int O>
void multiply_rows(const std::vector<Rounded<CHUNK>>& x, const int8_t* weights, const float* scales, float* y,
                   int64_t rows, int64_t chunks, int64_t outputs) {
    for (int64_t r = 0; r < rows; r += ROWS) {
        const Rounded<CHUNK>* a = &x[r * chunks];
        float* out = y + r * outputs;
        switch (rows - r) {
            case 1: multiply_block<CHUNK, O, 1>(a, weights, scales, out, chunks, outputs); break;
            case 2: multiply_block<CHUNK, O, 2>(a, weights, scales, out, chunks, outputs); break;
            case 3: multiply_block<CHUNK, O, 3>(a, weights, scales, out, chunks, outputs); break;
            default: multiply_block<CHUNK, O, ROWS>(a, weights, scales, out, chunks, outputs);
        }
    }
}

template <int CHUNK>
void multiply(const Tensor& x, const Tensor& weights, const Tensor& scales, Tensor& y) {
    const int64_t rows = x.size(0), inputs = x.size(1), chunks = inputs / CHUNK, outputs = weights.size(0);
    const bool parallel = rows * inputs * outputs >= MIN_PRODUCTS;
    const float* from = static_cast<const float*>(x.const_data_ptr());
    const int8_t* w = static_cast<const int8_t*>(weights.const_data_ptr());
    const float* s = static_cast<const float*>(scales.const_data_ptr());
    float* to = static_cast<float*>(y.mutable_data_ptr());
    std::vector<Rounded<CHUNK>> rounded(rows * chunks);
    // One row is rounded faster than threads are started.
#pragma omp parallel for schedule(static) if (parallel && rows > 1)
    for (int64_t r = 0; r < rows; r++) round_row<CHUNK>(from + r * inputs, &rounded[r * chunks], chunks);
#pragma omp parallel for schedule(static) if (parallel)
    for (int64_t n = 0; n < outputs; n += OUTPUTS) {
        if (n + OUTPUTS <= outputs) {
            multiply_rows<CHUNK, OUTPUTS>(rounded, w + n * inputs, s + n, to + n, rows, chunks, outputs);
        } else {
            multiply_rows<CHUNK, 1>(rounded, w + n * inputs, s + n, to + n, rows, chunks, outputs);
        }
    }
}

// Rows [M, K] in float32, weights [N, K], scales [N] in float32, all contiguous; the result [M, N].
Tensor int8_mm_neon(const Tensor& x, const Tensor& weights, const Tensor& scales) {
    Tensor y = torch::stable::new_empty(x, {x.size(0), weights.size(0)});
    if (x.size(1) % 64 == 0) {
        multiply<64>(x, weights, scales, y);
    } else {
        multiply<32>(x, weights, scales, y);
    }
    return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(phasor, CPU, library) { library.impl("int8_mm_neon", TORCH_BOX(&int8_mm_neon)); }
