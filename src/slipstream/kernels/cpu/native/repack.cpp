#include "repack.h"

#include <cstring>

#include "formats.h"

namespace slip {
namespace {

float half_to_float(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, 2);
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    const float sign = half & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-24f;
    if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    return sign * __builtin_ldexpf(static_cast<float>(1024 + mantissa), exponent - 25);
}

// The 32 codes of one block of one row as the panels keep them, from 0 on, and its scales: half floats d and m (which 8
// blocks may share) and bytes.
struct Block {
    uint8_t codes[32];
    uint8_t halves[4];
    uint8_t bytes[2];
};

// d, (m,) (32 fifth bits,) then 16 bytes: columns 0..15 low, 16..31 high.
void read_small(int32_t format, const uint8_t* p, Block& block) {
    const int halves = has_minimum(format) ? 4 : 2, fifth = code_bits(format) == 5 ? 4 : 0;
    uint32_t bits = 0;
    std::memcpy(block.halves, p, static_cast<size_t>(halves));
    std::memcpy(&bits, p + halves, static_cast<size_t>(fifth));
    p += halves + fifth;
    for (int i = 0; i < 16; ++i) {
        block.codes[i] = static_cast<uint8_t>((p[i] & 15) | (bits >> i & 1) << 4);
        block.codes[16 + i] = static_cast<uint8_t>(p[i] >> 4 | (bits >> (16 + i) & 1) << 4);
    }
}

// d, m, 12 bytes of scales and minima in six bits, (32 bytes of fifth bits, block b at bit b,) then 32 bytes for each two
// blocks: one in the low halves, the next in the high ones. A weight is d * scale * code - m * minimum.
void read_super(int32_t format, const uint8_t* p, int b, Block& block) {
    std::memcpy(block.halves, p, 4);
    block.halves[3] ^= 0x80;  // kept with its sign turned
    const uint8_t* packed = p + 4;
    if (b < 4) {
        block.bytes[0] = packed[b] & 63;
        block.bytes[1] = packed[b + 4] & 63;
    } else {
        block.bytes[0] = static_cast<uint8_t>((packed[b + 4] & 15) | packed[b - 4] >> 6 << 4);
        block.bytes[1] = static_cast<uint8_t>(packed[b + 4] >> 4 | packed[b] >> 6 << 4);
    }
    const uint8_t* fifth = p + 16;
    const uint8_t* codes = fifth + (code_bits(format) == 5 ? 32 : 0) + 32 * (b / 2);
    for (int i = 0; i < 32; ++i) {
        block.codes[i] = static_cast<uint8_t>(codes[i] >> 4 * (b % 2) & 15);
        if (code_bits(format) == 5) block.codes[i] |= static_cast<uint8_t>((fifth[i] >> b & 1) << 4);
    }
}

// 128 bytes of low halves, 64 of upper two bits, 16 scales, d. Of each half of the blocks, the first two lie in the low
// halves of 64 bytes and the other two in the high ones; upper bits of all four share 32 bytes.
void read_six(const uint8_t* p, int b, Block& block) {
    const int part = b / 4, t = b % 4;
    const uint8_t *low = p + 64 * part + 32 * (t % 2), *upper = p + 128 + 32 * part;
    for (int i = 0; i < 32; ++i)
        block.codes[i] = static_cast<uint8_t>((low[i] >> 4 * (t / 2) & 15) | (upper[i] >> 2 * t & 3) << 4);
    std::memcpy(block.bytes, p + 192 + 2 * b, 2);
    std::memcpy(block.halves, p + 208, 2);
}

Block read_block(int32_t format, const StoredRows& stored, int64_t row, int64_t b) {
    Block block{};
    const uint8_t* p = stored.rows + row * stored.row_bytes;
    const int within = static_cast<int>(b % kSuper);
    switch (format) {
        case Q4_0: read_small(format, p + b * 18, block); break;
        case Q4_1: read_small(format, p + b * 20, block); break;
        case Q5_0: read_small(format, p + b * 22, block); break;
        case Q5_1: read_small(format, p + b * 24, block); break;
        case Q4_K: read_super(format, p + b / kSuper * 144, within, block); break;
        case Q5_K: read_super(format, p + b / kSuper * 176, within, block); break;
        case Q6_K: read_six(p + b / kSuper * 210, within, block); break;
        case Q8_0:
            p += b * 34;
            std::memcpy(block.halves, p, 2);
            for (int i = 0; i < 32; ++i) block.codes[i] = p[2 + i] ^ 0x80;
            break;
        default:
            for (int i = 0; i < 32; ++i) {  // two's complement halves, the even column in the low one; kept plus 8
                const int64_t column = 32 * b + i;
                const uint8_t byte = column < stored.k ? p[column / 2] : 0;
                block.codes[i] = ((column % 2 ? byte >> 4 : byte) & 15) ^ 8;
            }
    }
    return block;
}

// Where a panel keeps a block's scales: 16 half floats d (and m after them), 16 bytes (and 16 more).
struct Places {
    int64_t halves, bytes;
};

Places places(int32_t format, int64_t b) {
    if (!is_super(format)) return {b * scale_share(format), 0};
    const int64_t shared = b / kSuper * kSuper * scale_share(format);
    return {shared, shared + half_bytes(format) + 32 * (b % kSuper)};
}

void write_block(int32_t format, const Block& block, int64_t b, int lane, uint8_t* scales, uint8_t* codes) {
    const int bits = code_bits(format);
    uint8_t* to = codes + b * code_bytes(format) + 4 * lane;
    for (int column = 0; column < 32; ++column) {
        const int i = column / 4, c = column % 4, code = block.codes[column];
        if (bits == 8) {
            to[64 * i + c] = static_cast<uint8_t>(code);
            continue;
        }
        to[64 * (i / 2) + c] |= static_cast<uint8_t>((code & 15) << (i % 2 ? 4 : 0));
        if (bits == 5) to[256 + c] |= static_cast<uint8_t>(code >> 4 << i);
        if (bits == 6) to[256 + 64 * (i / 4) + c] |= static_cast<uint8_t>(code >> 4 << 2 * (i % 4));
    }
    const Places at = places(format, b);
    for (int s = 0; s < half_bytes(format) / 32; ++s)
        std::memcpy(scales + at.halves + 32 * s + 2 * lane, block.halves + 2 * s, 2);
    for (int s = 0; is_super(format) && s < 2; ++s) scales[at.bytes + 16 * s + lane] = block.bytes[s];
}

// Bytes of rows, four columns of 16 rows after another: what a draft is made of that takes over while others decode.
void repack_bytes(const StoredRows& stored, int panel, uint8_t* codes) {
    const int64_t first = 16 * static_cast<int64_t>(panel), groups = (stored.k + 31) / 32 * 8;
    const int lanes = static_cast<int>(stored.n - first < 16 ? stored.n - first : 16);
    for (int64_t group = 0; group < groups; ++group)
        for (int lane = 0; lane < lanes; ++lane) {
            const int64_t left = stored.k - 4 * group;
            uint32_t four = 0;
            const uint8_t* from = stored.rows + (first + lane) * stored.row_bytes + 4 * group;
            if (left >= 4) std::memcpy(&four, from, 4);
            else if (left > 0) std::memcpy(&four, from, static_cast<size_t>(left));
            four ^= 0x80808080u;
            std::memcpy(codes + 64 * group + 4 * lane, &four, 4);
        }
}

}  // namespace

int64_t repacked_panel_bytes(int32_t format, int64_t k) { return panel_bytes(format, (k + 31) / 32); }

void repack_panels(int32_t format, const StoredRows& stored, int begin, int end, uint8_t* out) {
    const int64_t blocks = (stored.k + 31) / 32, size = panel_bytes(format, blocks);
    for (int panel = begin; panel < end; ++panel) {
        uint8_t* scales = out + panel * size;
        std::memset(scales, 0, static_cast<size_t>(size));
        if (format == W8A8) {
            repack_bytes(stored, panel, scales + scale_bytes(format, blocks));
            continue;
        }
        for (int lane = 0; lane < 16 && 16 * static_cast<int64_t>(panel) + lane < stored.n; ++lane)
            for (int64_t b = 0; b < blocks; ++b)
                write_block(format, read_block(format, stored, 16 * static_cast<int64_t>(panel) + lane, b), b, lane, scales,
                            scales + scale_bytes(format, blocks));
    }
}

void unpack_row(int32_t format, const uint8_t* panels, int64_t row, int64_t k, float* out) {
    const int64_t blocks = (k + 31) / 32;
    const int lane = static_cast<int>(row % 16);
    const uint8_t* scales = panels + row / 16 * panel_bytes(format, blocks);
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* codes = scales + scale_bytes(format, blocks) + b * code_bytes(format);
        const Places at = places(format, b);
        const uint8_t *halves = scales + at.halves + 2 * lane, *bytes = scales + at.bytes + lane;
        float d = half_bytes(format) ? half_to_float(halves) : 1.0f, minimum = has_minimum(format) ? half_to_float(halves + 32) : 0.0f;
        if (is_super(format) && has_minimum(format)) {
            d *= static_cast<float>(bytes[0]);
            minimum *= static_cast<float>(bytes[16]);
        }
        for (int i = 0; i < 32 && 32 * b + i < k; ++i) {
            int code = panel_code(code_bits(format), codes, i / 4, 4 * lane + i % 4) - code_zero(format);
            if (has_half_scales(format)) code *= static_cast<int8_t>(bytes[i < 16 ? 0 : 16]);
            const float value = d * static_cast<float>(code);
            out[32 * b + i] = has_minimum(format) ? value + minimum : value;
        }
    }
}

}  // namespace slip
