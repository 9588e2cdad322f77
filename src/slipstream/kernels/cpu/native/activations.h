// What a product reads of its input: floats as they are, or int8 codes with a scale per block of 32 or per token.
#pragma once
#include "abi.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr bool is_dense(int format) { return format <= F16; }
constexpr bool is_per_token(int format) { return format == W8A8 || format == W4A8; }
constexpr bool is_by_block(int format) { return !is_dense(format) && !is_per_token(format); }
constexpr bool is_four_bit(int format) { return format == Q4_1 || format == Q4_0 || format == W4A8; }
SLIP_INLINE int num_blocks(int k) { return (k + 31) / 32; }

// What is added to a weight's codes to store them; on AVX2 eight-bit codes are multiplied with their sign.
constexpr int code_offset(int format) {
#if SLIP_ISA == 1
    return format == Q4_0 || format == W4A8 ? 8 : 0;
#else
    return is_four_bit(format) ? (format == Q4_1 ? 0 : 8) : 128;
#endif
}

// Rows of x as a format wants them: floats, or int8 codes with a scale per block of 32 or per token.
struct Activations {
    const float* x;
    int64_t stride;
    int8_t* codes;       // [rows, 32 blocks]
    float* scale;        // [rows, blocks] or [rows]
    float* scaled_sum;   // scale times the sum of a block's codes, [rows, blocks]
    int32_t* start;      // what the integer sum starts from, so that codes may be stored with an offset
    int blocks;
};

constexpr int64_t activation_bytes(int64_t rows, int64_t k) { return rows * ((k + 31) / 32) * (32 + 12) + 256; }

SLIP_INLINE Activations activations(const Linear& w, const float* x, int64_t stride, int rows, void* room) {
    Activations a{x, stride, nullptr, nullptr, nullptr, nullptr, num_blocks(w.k)};
    const int64_t blocks = static_cast<int64_t>(rows) * a.blocks;
    a.scale = static_cast<float*>(room);
    a.scaled_sum = a.scale + blocks;
    a.start = reinterpret_cast<int32_t*>(a.scaled_sum + blocks);
    a.codes = reinterpret_cast<int8_t*>(a.start + blocks);
    return a;
}

SLIP_INLINE CodeSum quantize16(const float* x, int n, float scale, int8_t* codes, CodeSum sum) {
    return vstore_codes(codes, n >= 16 ? vdiv(vload(x), vset(scale)) : vdiv(vload_n(x, n), vset(scale)), sum);
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
SLIP_INLINE void quantize_block(const Linear& w, const Activations& a, int row, int block) {
    const float* x = a.x + row * a.stride + 32 * block;
    const int64_t at = static_cast<int64_t>(row) * a.blocks + block;
    const float scale = vmax_lane(vmax(vabs(vload(x)), vabs(vload(x + 16)))) / 127.0f;
    const int sum = quantize_span(x, 32, scale, a.codes + 32 * at, 32);
    a.scale[at] = scale;
    a.scaled_sum[at] = scale * static_cast<float>(sum);
    a.start[at] = -code_offset(w.format) * sum;
}

static void quantize_row(const Linear& w, const Activations& a, int row) {
    const float* x = a.x + row * a.stride;
    if (is_per_token(w.format)) {
        V largest = vzero();
        for (int i = 0; i < w.k; i += 16) largest = vmax(largest, vabs(w.k - i >= 16 ? vload(x + i) : vload_n(x + i, w.k - i)));
        const float scale = vmax_lane(largest) / 127.0f;
        int8_t* codes = a.codes + 32 * static_cast<int64_t>(row) * a.blocks;
        a.scale[row] = scale;
        a.start[row] = -code_offset(w.format) * quantize_span(x, w.k, scale, codes, 32 * a.blocks);
        return;
    }
    for (int block = 0; block < a.blocks; ++block) quantize_block(w, a, row, block);
}

static void prepare_rows(const Linear& w, const Activations& a, int begin, int end) {
    if (is_dense(w.format)) return;
    for (int row = begin; row < end; ++row) quantize_row(w, a, row);
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
