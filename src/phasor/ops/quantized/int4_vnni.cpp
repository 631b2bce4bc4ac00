// y = x W^T with W in 4 bits and x rounded to 8 bits, for x86 processors with AVX-512 and VNNI.
//
// A block is 16 outputs, one per lane. Its weights are [K/8, 16, 4] bytes: byte j of a lane holds input j of eight in
// its lower half and input j + 4 in the upper one, each plus 8. Its scales are [K/group, 16] in bfloat16. Every 32
// inputs of a row of x share a scale. A group's sum of products is exact, in 32-bit integers.

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace {

using torch::stable::Tensor;

constexpr int64_t LANES = 16, CHUNK = 32, CHUNK_BYTES = CHUNK * LANES / 2, ROWS = 4;
constexpr int64_t MIN_PRODUCTS = 1 << 17;  // with fewer, starting threads takes longer than it saves
constexpr int QUIET_NAN = 0x01, SIGNALING_NAN = 0x80;

struct Rounded {  // 32 inputs of a row
    int8_t values[CHUNK];
    int32_t offset;  // -8 times the sum of the values: weights are stored plus 8
    float scale;
};

void round_row(const float* x, Rounded* out, int64_t chunks) {
    for (int64_t c = 0; c < chunks; c++, x += CHUNK, out++) {
        const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + LANES);
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        const bool has_nan = _mm512_fpclass_ps_mask(a, QUIET_NAN | SIGNALING_NAN) |
                             _mm512_fpclass_ps_mask(b, QUIET_NAN | SIGNALING_NAN);
        const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
        const __m512i i = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        const __m512i j = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out->values), _mm512_cvtepi32_epi8(i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out->values + LANES), _mm512_cvtepi32_epi8(j));
        out->offset = -8 * _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
        out->scale = has_nan ? std::numeric_limits<float>::quiet_NaN() : largest / 127.0f;
    }
}

inline __m512i broadcast(const int8_t* four) {
    int32_t bits;
    std::memcpy(&bits, four, 4);
    return _mm512_set1_epi32(bits);
}

// One block of outputs for R rows.
template <int R>
void multiply_block(const Rounded* x, const uint8_t* weights, const uint16_t* scales, const float* bias, float* y,
                    int64_t chunks, int64_t chunks_per_group, int64_t outputs, __mmask16 lanes) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m512 first_sum = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(lanes, bias);
    __m512 acc[R];
    for (int r = 0; r < R; r++) acc[r] = first_sum;
    for (int64_t c = 0; c < chunks; c++, weights += CHUNK_BYTES) {
        __m512i sum[R];
        for (int r = 0; r < R; r++) sum[r] = _mm512_set1_epi32(x[r * chunks + c].offset);
        for (int i = 0; i < 4; i++) {
            const __m512i both = _mm512_loadu_si512(weights + 64 * i);
            const __m512i first = _mm512_and_si512(both, low);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            for (int r = 0; r < R; r++) {
                const int8_t* values = x[r * chunks + c].values + 8 * i;
                sum[r] = _mm512_dpbusd_epi32(sum[r], first, broadcast(values));
                sum[r] = _mm512_dpbusd_epi32(sum[r], second, broadcast(values + 4));
            }
        }
        const __m256i bits = _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(scales + c / chunks_per_group * LANES));
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        for (int r = 0; r < R; r++) {
            const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(x[r * chunks + c].scale));
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), by, acc[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm512_mask_storeu_ps(y + r * outputs, lanes, acc[r]);
}

// Rows [..., K] in float32, and a bias [outputs] in float32 if there is one, contiguous; the result [..., outputs].
Tensor int4_mm_vnni(const Tensor& x, const Tensor& weights, const Tensor& scales, int64_t outputs,
                    std::optional<Tensor> bias) {
    const int64_t inputs = x.size(x.dim() - 1), rows = inputs == 0 ? 0 : x.numel() / inputs, chunks = inputs / CHUNK;
    const int64_t blocks = scales.size(0), groups = scales.size(1);
    std::vector<int64_t> shape;
    for (int64_t i = 0; i + 1 < x.dim(); i++) shape.push_back(x.size(i));
    shape.push_back(outputs);
    Tensor y = torch::stable::new_empty(x, shape);
    const float* added = bias.has_value() ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
    const float* from = static_cast<const float*>(x.const_data_ptr());
    float* to = static_cast<float*>(y.mutable_data_ptr());
    const uint8_t* all_weights = static_cast<const uint8_t*>(weights.const_data_ptr());
    const uint16_t* all_scales = static_cast<const uint16_t*>(scales.const_data_ptr());
    std::vector<Rounded> rounded(rows * chunks);
    // One row is rounded faster than threads are started.
#pragma omp parallel for schedule(static) if (rows > 1 && rows * inputs * outputs >= MIN_PRODUCTS)
    for (int64_t r = 0; r < rows; r++) round_row(from + r * chunks * CHUNK, &rounded[r * chunks], chunks);
#pragma omp parallel for schedule(static) if (rows * inputs * outputs >= MIN_PRODUCTS)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t left = outputs - b * LANES;
        const __mmask16 lanes = left < LANES ? (1u << left) - 1 : 0xFFFF;
        const uint8_t* w = all_weights + b * chunks * CHUNK_BYTES;
        const uint16_t* s = all_scales + b * groups * LANES;
        const float* t = added == nullptr ? nullptr : added + b * LANES;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const Rounded* a = &rounded[r * chunks];
            float* out = to + r * outputs + b * LANES;
            switch (rows - r) {
                case 1: multiply_block<1>(a, w, s, t, out, chunks, chunks / groups, outputs, lanes); break;
                case 2: multiply_block<2>(a, w, s, t, out, chunks, chunks / groups, outputs, lanes); break;
                case 3: multiply_block<3>(a, w, s, t, out, chunks, chunks / groups, outputs, lanes); break;
                default: multiply_block<ROWS>(a, w, s, t, out, chunks, chunks / groups, outputs, lanes);
            }
        }
    }
    return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(phasor, CPU, library) { library.impl("int4_mm_vnni", TORCH_BOX(&int4_mm_vnni)); }
