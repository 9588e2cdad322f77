#include "repack.h"

#include <cstring>

#include "abi.h"

namespace slip {
namespace {

bool four_bit(int32_t format) { return format == Q4_1 || format == Q4_0 || format == W4A8; }
int64_t code_bytes(int32_t format) { return four_bit(format) ? 256 : 512; }
int64_t scale_bytes(int32_t format) { return format == Q4_1 ? 64 : format == Q4_0 || format == Q8_0 ? 32 : 0; }
int64_t codes_start(int32_t format, int64_t k) { return ((k + 31) / 32 * scale_bytes(format) + 63) / 64 * 64; }

float half_to_float(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, 2);
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    const float sign = half & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-24f;
    if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    return sign * __builtin_ldexpf(static_cast<float>(1024 + mantissa), exponent - 25);
}

// The 32 codes of one block of one row, as the panels keep them (eight-bit codes plus 128), and its scales.
struct Block {
    uint8_t codes[32];
    uint8_t scales[4];
};

Block read_block(int32_t format, const StoredRows& stored, int64_t row, int64_t b) {
    Block block{};
    const uint8_t* p = stored.rows + row * stored.row_bytes;
    if (format == Q4_1 || format == Q4_0) {  // d, (m,) then 16 bytes: columns 0..15 low, 16..31 high
        const int scales = format == Q4_1 ? 4 : 2;
        p += b * (16 + scales);
        std::memcpy(block.scales, p, static_cast<size_t>(scales));
        for (int i = 0; i < 16; ++i) {
            block.codes[i] = p[scales + i] & 15;
            block.codes[16 + i] = p[scales + i] >> 4;
        }
    } else if (format == Q8_0) {
        p += b * 34;
        std::memcpy(block.scales, p, 2);
        for (int i = 0; i < 32; ++i) block.codes[i] = p[2 + i] ^ 0x80;
    } else {
        for (int i = 0; i < 32; ++i) {
            const int64_t column = 32 * b + i;
            const bool inside = column < stored.k;
            if (format == W8A8) {
                block.codes[i] = (inside ? p[column] : 0) ^ 0x80;
            } else {  // two's complement halves, the even column in the low one; kept plus 8
                const uint8_t byte = inside ? p[column / 2] : 0;
                block.codes[i] = ((column % 2 ? byte >> 4 : byte) & 15) ^ 8;
            }
        }
    }
    return block;
}

}  // namespace

int64_t repacked_panel_bytes(int32_t format, int64_t k) {
    return codes_start(format, k) + (k + 31) / 32 * code_bytes(format);
}

void repack_panels(int32_t format, const StoredRows& stored, int begin, int end, uint8_t* out) {
    const int64_t blocks = (stored.k + 31) / 32, panel_bytes = repacked_panel_bytes(format, stored.k);
    for (int panel = begin; panel < end; ++panel) {
        uint8_t* scales = out + panel * panel_bytes;
        uint8_t* codes = scales + codes_start(format, stored.k);
        std::memset(scales, 0, static_cast<size_t>(panel_bytes));
        for (int lane = 0; lane < 16 && 16 * static_cast<int64_t>(panel) + lane < stored.n; ++lane) {
            for (int64_t b = 0; b < blocks; ++b) {
                const Block block = read_block(format, stored, 16 * static_cast<int64_t>(panel) + lane, b);
                uint8_t* to = codes + b * code_bytes(format) + 4 * lane;
                if (four_bit(format)) {
                    for (int i = 0; i < 32; ++i) to[64 * (i / 8) + i % 4] |= static_cast<uint8_t>(block.codes[i] << (i % 8 < 4 ? 0 : 4));
                } else {
                    for (int i = 0; i < 32; ++i) to[64 * (i / 4) + i % 4] = block.codes[i];
                }
                for (int64_t s = 0; s < scale_bytes(format) / 32; ++s)
                    std::memcpy(scales + b * scale_bytes(format) + 32 * s + 2 * lane, block.scales + 2 * s, 2);
            }
        }
    }
}

void unpack_row(int32_t format, const uint8_t* panels, int64_t row, int64_t k, float* out) {
    const int64_t lane = row % 16;
    const uint8_t* scales = panels + row / 16 * repacked_panel_bytes(format, k);
    const uint8_t* codes = scales + codes_start(format, k);
    for (int64_t column = 0; column < k; ++column) {
        const int64_t b = column / 32, i = column % 32;
        const uint8_t* block = codes + b * code_bytes(format) + 4 * lane;
        const uint8_t* scale = scales + b * scale_bytes(format) + 2 * lane;
        const float d = half_to_float(scale);
        if (format == Q8_0) {
            out[column] = d * static_cast<float>(block[64 * (i / 4) + i % 4] - 128);
            continue;
        }
        const uint8_t byte = block[64 * (i / 8) + i % 4];
        const float code = static_cast<float>(i % 8 < 4 ? byte & 15 : byte >> 4);
        out[column] = format == Q4_1 ? d * code + half_to_float(scale + 32) : d * (code - 8.0f);
    }
}

}  // namespace slip
