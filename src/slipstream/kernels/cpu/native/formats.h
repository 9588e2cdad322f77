// What a block of 32 columns is in each packed format, and the bytes it takes in a panel of 16 rows (see panels.h).
#pragma once
#include "abi.h"

namespace slip {

constexpr int kSuper = 8;  // blocks that share their half floats, where blocks have scales of bytes beside them

constexpr bool is_dense(int format) { return format <= F16; }
constexpr bool is_per_token(int format) { return format == W8A8 || format == W4A8; }
constexpr bool is_by_block(int format) { return !is_dense(format) && !is_per_token(format); }
constexpr bool is_super(int format) { return format == Q4_K || format == Q5_K || format == Q6_K; }
constexpr bool has_minimum(int format) { return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K; }
constexpr bool has_half_scales(int format) { return format == Q6_K; }  // one for columns 0..15, one for 16..31

constexpr int code_bits(int format) {
    switch (format) {
        case Q8_0:
        case W8A8: return 8;
        case Q6_K: return 6;
        case Q5_0:
        case Q5_1:
        case Q5_K: return 5;
        default: return 4;
    }
}

// What is added to a weight's codes to store them as whole numbers from 0 on.
constexpr int code_zero(int format) {
    return has_minimum(format) ? 0 : 1 << (code_bits(format) - 1);
}

constexpr int code_bytes(int format) { return 64 * code_bits(format); }
constexpr int half_bytes(int format) { return is_per_token(format) ? 0 : has_minimum(format) ? 64 : 32; }
// A block's share: half floats of its own, or two bytes a row and an eighth of the half floats.
constexpr int scale_share(int format) { return is_super(format) ? half_bytes(format) / kSuper + 32 : half_bytes(format); }
constexpr int64_t scale_bytes(int format, int64_t blocks) { return (blocks * scale_share(format) + 63) / 64 * 64; }
constexpr int64_t panel_bytes(int format, int64_t blocks) {
    return scale_bytes(format, blocks) + blocks * code_bytes(format);
}

// The code that a block of a panel has of column 4 i + c of row r, where `lane` is 4 r + c.
constexpr int panel_code(int bits, const uint8_t* codes, int i, int lane) {
    if (bits == 8) return codes[64 * i + lane];
    const int low = codes[64 * (i / 2) + lane] >> (i % 2 ? 4 : 0) & 15;
    if (bits == 4) return low;
    if (bits == 5) return low | (codes[256 + lane] >> i & 1) << 4;
    return low | (codes[256 + 64 * (i / 4) + lane] >> 2 * (i % 4) & 3) << 4;
}

}  // namespace slip
