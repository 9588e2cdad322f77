// What a product reads of its input: floats as they are, or int8 codes with a scale per block of 32 or per token.
#pragma once
#include "formats.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

SLIP_INLINE int num_blocks(int k) { return (k + 31) / 32; }

// What is added to a weight's codes when they are multiplied; on AVX2 eight-bit codes are multiplied with their sign.
constexpr int code_offset(int format) {
#if SLIP_ISA == 1
    if (code_bits(format) == 8) return 0;
#endif
    return code_zero(format);
}

SLIP_INLINE int num_runs(const Linear& w) {
    int runs = 0;
    for (const Linear* run = &w; run; run = run->rest) ++runs;
    return runs;
}

// Rows of x as a format wants them: floats, or int8 codes with a scale per block of 32 or per token.
struct Activations {
    const float* x;
    int64_t stride;
    int8_t* codes;      // [rows, 32 blocks]
    float* scale;       // [rows, blocks] or [rows]
    float* scaled_sum;  // scale times the sum of a block's codes, [rows, blocks]
    int32_t* start;     // what the integer sums start from, so that codes may be stored with an offset: [rows, blocks],
                        // [rows, blocks, 2] where halves have scales, or [rows]
    int64_t run_starts;  // from the starts of a run of the weight's rows to those of the next
    int blocks;
};

SLIP_INLINE int64_t activation_bytes(int64_t rows, const Linear& w) {
    return rows * num_blocks(w.k) * (32 + 8 + 8 * num_runs(w)) + 256;
}

SLIP_INLINE Activations activations(const Linear& w, const float* x, int64_t stride, int rows, void* buffer) {
    const int64_t blocks = static_cast<int64_t>(rows) * num_blocks(w.k);
    Activations a{x, stride, nullptr, nullptr, nullptr, nullptr, 2 * blocks, num_blocks(w.k)};
    a.scale = static_cast<float*>(buffer);
    a.scaled_sum = a.scale + blocks;
    a.codes = reinterpret_cast<int8_t*>(a.scaled_sum + blocks);
    a.start = reinterpret_cast<int32_t*>(a.codes + 32 * blocks);
    return a;
}

SLIP_INLINE CodeSum quantize16(const float* x, int n, float scale, int8_t* codes, CodeSum sum) {
    const V codes16 = vdiv(n >= 16 ? vload(x) : vload_n(x, n), vset(scale));
    // What is no number becomes -127 on every instruction set; a scale that is denormal may leave more than 127.
    return vstore_codes(codes, vmin(vmax(codes16, vset(-127.0f)), vset(127.0f)), sum);
}

SLIP_INLINE int quantize_span(const float* x, int k, float scale, int8_t* codes, int padded) {
    CodeSum sum = no_codes();
    for (int i = 0; i < padded; i += 16) {
        if (scale == 0.0f || i >= k) std::memset(codes + i, 0, 16);
        else sum = quantize16(x + i, k - i, scale, codes + i, sum);
    }
    return total(sum);
}

// One block of 32 values of a row, for a format with a scale per block.
SLIP_INLINE void quantize_block(const Linear& w, const Activations& a, int row, int block, const float* x) {
    const int64_t at = static_cast<int64_t>(row) * a.blocks + block;
    const float scale = vmax_lane(vmax(vabs(vload(x)), vabs(vload(x + 16)))) / 127.0f;
    int8_t* codes = a.codes + 32 * at;
    const int sum = quantize_span(x, 32, scale, codes, 32);
    a.scale[at] = scale;
    a.scaled_sum[at] = scale * static_cast<float>(sum);
    int32_t* start = a.start;
    for (const Linear* run = &w; run; run = run->rest, start += a.run_starts) {
        if (has_half_scales(run->format)) {
            int first = 0;
            for (int i = 0; i < 16; ++i) first += codes[i];
            start[2 * at] = -code_offset(run->format) * first;
            start[2 * at + 1] = -code_offset(run->format) * (sum - first);
        } else {
            start[at] = -code_offset(run->format) * sum;
        }
    }
}

static void quantize_row(const Linear& w, const Activations& a, int row, const float* x) {
    if (is_per_token(w.format)) {
        V largest = vzero();
        for (int i = 0; i < w.k; i += 16) largest = vmax(largest, vabs(w.k - i >= 16 ? vload(x + i) : vload_n(x + i, w.k - i)));
        const float scale = vmax_lane(largest) / 127.0f;
        int8_t* codes = a.codes + 32 * static_cast<int64_t>(row) * a.blocks;
        a.scale[row] = scale;
        a.start[row] = -code_offset(w.format) * quantize_span(x, w.k, scale, codes, 32 * a.blocks);
        return;
    }
    for (int block = 0; block < a.blocks; ++block) quantize_block(w, a, row, block, x + 32 * block);
}

static void prepare_rows(const Linear& w, const Activations& a, int begin, int end) {
    if (is_dense(w.format)) return;
    for (int row = begin; row < end; ++row) quantize_row(w, a, row, a.x + row * a.stride);
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
