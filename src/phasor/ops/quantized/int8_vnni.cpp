// y = x W^T + b with W in 8 bits and x rounded to 8 bits, for x86 processors with AVX-512 and VNNI.
//
// Every 64 inputs of a row of x share a scale; the last may be 32. Their sum of products is exact, in
// 32-bit integers. VNNI multiplies unsigned by signed integers: the weight's sign goes to the input.

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

constexpr int64_t CHUNK = 64, LANES = 16, ROWS = 4;
constexpr int64_t MIN_PRODUCTS = 1 << 17;  // with fewer, starting threads takes longer than it saves
constexpr int64_t MIN_ELEMENTS = 1 << 15;  // of rounding and scaling, likewise
constexpr int QUIET_NAN = 0x01, SIGNALING_NAN = 0x80, INFINITE = 0x18;

std::vector<int64_t> result_shape(const Tensor& x, int64_t outputs) {
    std::vector<int64_t> shape;
    for (int64_t i = 0; i + 1 < x.dim(); i++) shape.push_back(x.size(i));
    shape.push_back(outputs);
    return shape;
}

struct Rounded {  // 64 inputs of a row
    int8_t values[CHUNK];
    float scale;
};

void round_row(const float* x, Rounded* out, int64_t inputs) {
    for (int64_t c = 0; c < inputs; c += CHUNK, out++) {
        __m512 part[CHUNK / LANES], most = _mm512_setzero_ps();
        __mmask16 nan = 0;
        for (int i = 0; i < CHUNK / LANES; i++) {
            part[i] = c + i * LANES < inputs ? _mm512_loadu_ps(x + c + i * LANES) : _mm512_setzero_ps();
            most = _mm512_max_ps(most, _mm512_abs_ps(part[i]));
            nan |= _mm512_fpclass_ps_mask(part[i], QUIET_NAN | SIGNALING_NAN);
        }
        const float largest = _mm512_reduce_max_ps(most);
        const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
        for (int i = 0; i < CHUNK / LANES; i++)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out->values + i * LANES),
                             _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse))));
        out->scale = nan ? std::numeric_limits<float>::quiet_NaN() : largest / 127.0f;
    }
}

// One output for R rows.
template <int R>
void multiply_output(const Rounded* x, const int8_t* weights, float scale, float bias, float* y, int64_t inputs,
                     int64_t outputs) {
    const int64_t chunks = (inputs + CHUNK - 1) / CHUNK;
    __m512 acc[R];
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t c = 0; c < chunks; c++) {
        const __mmask64 there = inputs - c * CHUNK < CHUNK ? (1ull << (inputs - c * CHUNK)) - 1 : ~0ull;
        const __m512i w = _mm512_maskz_loadu_epi8(there, weights + c * CHUNK);
        const __mmask64 negative = _mm512_movepi8_mask(w);
        const __m512i size = _mm512_abs_epi8(w);
        for (int r = 0; r < R; r++) {
            const __m512i values = _mm512_loadu_si512(x[r * chunks + c].values);
            const __m512i turned = _mm512_mask_sub_epi8(values, negative, _mm512_setzero_si512(), values);
            const __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), size, turned);
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x[r * chunks + c].scale), acc[r]);
        }
    }
    for (int r = 0; r < R; r++) y[r * outputs] = _mm512_reduce_add_ps(acc[r]) * scale + bias;
}

// Rows [..., K] and scales [N] in float32, weights [N, K], the bias [N] in float32 if there is one, all contiguous; K is a
// multiple of 32. The result is [..., N].
Tensor int8_mm_vnni(const Tensor& x, const Tensor& weights, const Tensor& scales, std::optional<Tensor> bias) {
    const int64_t outputs = weights.size(0), inputs = weights.size(1), chunks = (inputs + CHUNK - 1) / CHUNK;
    const int64_t rows = inputs == 0 ? 0 : x.numel() / inputs;
    Tensor y = torch::stable::new_empty(x, result_shape(x, outputs));
    const float* from = static_cast<const float*>(x.const_data_ptr());
    float* to = static_cast<float*>(y.mutable_data_ptr());
    const int8_t* w = static_cast<const int8_t*>(weights.const_data_ptr());
    const float* s = static_cast<const float*>(scales.const_data_ptr());
    const float* b = bias.has_value() ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
    std::vector<Rounded> rounded(rows * chunks);
    const bool parallel = rows * inputs * outputs >= MIN_PRODUCTS;
    // One row is rounded faster than threads are started.
#pragma omp parallel for schedule(static) if (rows > 1 && parallel)
    for (int64_t r = 0; r < rows; r++) round_row(from + r * inputs, &rounded[r * chunks], inputs);
#pragma omp parallel for schedule(static) if (parallel)
    for (int64_t n = 0; n < outputs; n++) {
        const float added = b == nullptr ? 0.0f : b[n];
        for (int64_t r = 0; r < rows; r += ROWS) {
            const Rounded* a = &rounded[r * chunks];
            float* out = to + r * outputs + n;
            switch (rows - r) {
                case 1: multiply_output<1>(a, w + n * inputs, s[n], added, out, inputs, outputs); break;
                case 2: multiply_output<2>(a, w + n * inputs, s[n], added, out, inputs, outputs); break;
                case 3: multiply_output<3>(a, w + n * inputs, s[n], added, out, inputs, outputs); break;
                default: multiply_output<ROWS>(a, w + n * inputs, s[n], added, out, inputs, outputs);
            }
        }
    }
    return y;
}

inline __mmask16 lanes_left(int64_t left) { return left < LANES ? (1u << left) - 1 : 0xFFFF; }

// Sums of products of rows and weights, into the memory of a result in float32.
void multiply_integers(const Tensor& rounded, const Tensor& weights, const Tensor& y, int64_t rows) {
    std::array<StableIValue, 2> as_integers{from(torch::stable::reshape(y, {rows, weights.size(0)})),
                                            from(ScalarType::Int)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::view", "dtype", as_integers.data(), TORCH_ABI_VERSION));
    std::array<StableIValue, 3> product{from(rounded), from(torch::stable::transpose(weights, 0, 1)), as_integers[0]};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_int_mm", "out", product.data(), TORCH_ABI_VERSION));
    to<Tensor>(product[0]);
}

// A row as the nearest of 255 values, whose step is returned: NaN where an input is, or is infinite.
float round_whole_row(const float* x, int8_t* out, int64_t inputs) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int64_t c = 0; c < inputs; c += LANES) {
        const __m512 part = _mm512_maskz_loadu_ps(lanes_left(inputs - c), x + c);
        most = _mm512_max_ps(most, _mm512_abs_ps(part));
        nan |= _mm512_fpclass_ps_mask(part, QUIET_NAN | SIGNALING_NAN | INFINITE);
    }
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    for (int64_t c = 0; c < inputs; c += LANES) {
        const __mmask16 there = lanes_left(inputs - c);
        const __m512 part = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + c), inverse);
        _mm512_mask_cvtepi32_storeu_epi8(out + c, there, _mm512_cvtps_epi32(part));
    }
    return nan ? std::numeric_limits<float>::quiet_NaN() : largest / 127.0f;
}

// Sums of products in place of which their floats are written.
void scale_row(float* y, float step, const float* scales, const float* bias, int64_t outputs) {
    const __m512 by = _mm512_set1_ps(step);
    for (int64_t n = 0; n < outputs; n += LANES) {
        const __mmask16 there = lanes_left(outputs - n);
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(there, y + n));
        const __m512 scale = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, scales + n), by);
        const __m512 added = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(there, bias + n);
        _mm512_mask_storeu_ps(y + n, there, _mm512_fmadd_ps(sum, scale, added));
    }
}

// As above, for any K.
Tensor int8_gemm_vnni(const Tensor& x, const Tensor& weights, const Tensor& scales, std::optional<Tensor> bias) {
    const int64_t outputs = weights.size(0), inputs = weights.size(1);
    Tensor y = torch::stable::new_empty(x, result_shape(x, outputs));
    const int64_t rows = outputs == 0 ? 0 : y.numel() / outputs;
    Tensor rounded = torch::stable::new_empty(x, {rows, inputs}, ScalarType::Char);
    std::vector<float> steps(rows);
    const float* from = static_cast<const float*>(x.const_data_ptr());
    float* to = static_cast<float*>(y.mutable_data_ptr());
    int8_t* values = static_cast<int8_t*>(rounded.mutable_data_ptr());
    const float* s = static_cast<const float*>(scales.const_data_ptr());
    const float* b = bias.has_value() ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
#pragma omp parallel for schedule(static) if (rows * inputs >= MIN_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) steps[r] = round_whole_row(from + r * inputs, values + r * inputs, inputs);
    multiply_integers(rounded, weights, y, rows);
#pragma omp parallel for schedule(static) if (rows * outputs >= MIN_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) scale_row(to + r * outputs, steps[r], s, b, outputs);
    return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(phasor, CPU, library) {
    library.impl("int8_mm_vnni", TORCH_BOX(&int8_mm_vnni));
    library.impl("int8_gemm_vnni", TORCH_BOX(&int8_gemm_vnni));
}
