// y = x W^T with W in 8 bits and x rounded to 8 bits, for ARM processors with dot products of 8-bit integers.
//
// Every 64 inputs of a row of x share a scale, or every 32 where 64 do not divide them. Their sum of
// products is exact, in 32-bit integers.

#include <arm_neon.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace {

using torch::stable::Tensor;

constexpr int64_t OUTPUTS = 2, ROWS = 4;   // of a block
constexpr int64_t PANEL_BYTES = 1 << 18;   // of rounded rows that are multiplied at a time: they fit half of an L2 cache
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
void multiply_block(const Rounded<CHUNK>* x, const int8_t* weights, const float* scales, const float* bias, float* y,
                    int64_t chunks, int64_t outputs) {
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
        for (int o = 0; o < O; o++)
            y[r * outputs + o] = vaddvq_f32(acc[o][r]) * scales[o] + (bias == nullptr ? 0.0f : bias[o]);
}

// O outputs for the rows from `first` to `last`.
template <int CHUNK, int O>
void multiply_rows(const std::vector<Rounded<CHUNK>>& x, const int8_t* weights, const float* scales, const float* bias,
                   float* y, int64_t first, int64_t last, int64_t chunks, int64_t outputs) {
    for (int64_t r = first; r < last; r += ROWS) {
        const Rounded<CHUNK>* a = &x[r * chunks];
        float* out = y + r * outputs;
        switch (last - r) {
            case 1: multiply_block<CHUNK, O, 1>(a, weights, scales, bias, out, chunks, outputs); break;
            case 2: multiply_block<CHUNK, O, 2>(a, weights, scales, bias, out, chunks, outputs); break;
            case 3: multiply_block<CHUNK, O, 3>(a, weights, scales, bias, out, chunks, outputs); break;
            default: multiply_block<CHUNK, O, ROWS>(a, weights, scales, bias, out, chunks, outputs);
        }
    }
}

template <int CHUNK>
void multiply(const float* x, const int8_t* w, const float* s, const float* b, float* y, int64_t rows, int64_t inputs,
              int64_t outputs) {
    const int64_t chunks = inputs / CHUNK;
    const int64_t panel = std::max<int64_t>(PANEL_BYTES / inputs / ROWS, 1) * ROWS;
    const bool parallel = rows * inputs * outputs >= MIN_PRODUCTS;
    std::vector<Rounded<CHUNK>> rounded(rows * chunks);
    // One row is rounded faster than threads are started.
#pragma omp parallel for schedule(static) if (parallel && rows > 1)
    for (int64_t r = 0; r < rows; r++) round_row<CHUNK>(x + r * inputs, &rounded[r * chunks], chunks);
#pragma omp parallel if (parallel)
    for (int64_t first = 0; first < rows; first += panel) {
        const int64_t last = std::min(first + panel, rows);
        // A thread has the same outputs for every panel, and waits for no other.
#pragma omp for schedule(static) nowait
        for (int64_t n = 0; n < outputs; n += OUTPUTS) {
            const float* t = b == nullptr ? nullptr : b + n;
            if (n + OUTPUTS <= outputs) {
                multiply_rows<CHUNK, OUTPUTS>(rounded, w + n * inputs, s + n, t, y + n, first, last, chunks, outputs);
            } else {
                multiply_rows<CHUNK, 1>(rounded, w + n * inputs, s + n, t, y + n, first, last, chunks, outputs);
            }
        }
    }
}

// Rows [..., K] and scales [N] in float32, weights [N, K], the bias [N] in float32 if there is one, all contiguous; K is a
// multiple of 32. The result is [..., N].
Tensor int8_mm_neon(const Tensor& x, const Tensor& weights, const Tensor& scales, std::optional<Tensor> bias) {
    const int64_t outputs = weights.size(0), inputs = weights.size(1), rows = inputs == 0 ? 0 : x.numel() / inputs;
    std::vector<int64_t> shape;
    for (int64_t i = 0; i + 1 < x.dim(); i++) shape.push_back(x.size(i));
    shape.push_back(outputs);
    Tensor y = torch::stable::new_empty(x, shape);
    const float* from = static_cast<const float*>(x.const_data_ptr());
    const int8_t* w = static_cast<const int8_t*>(weights.const_data_ptr());
    const float* s = static_cast<const float*>(scales.const_data_ptr());
    const float* b = bias.has_value() ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
    float* to = static_cast<float*>(y.mutable_data_ptr());
    if (inputs % 64 == 0) {
        multiply<64>(from, w, s, b, to, rows, inputs, outputs);
    } else {
        multiply<32>(from, w, s, b, to, rows, inputs, outputs);
    }
    return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(phasor, CPU, library) { library.impl("int8_mm_neon", TORCH_BOX(&int8_mm_neon)); }
