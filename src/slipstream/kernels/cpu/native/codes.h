// The codes of a block of 16 rows as vectors, and their products with a row of activations, for each instruction set.
#pragma once
#include <utility>

#include "formats.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

#if SLIP_ISA == 2

constexpr int kTile = 12, kAbreast = 2;
constexpr int kDenseRows = 4, kDenseTile = 4;
using IV = __m512i;
struct Weights {
    __m512i w[8];
};
SLIP_INLINE IV iset(int32_t x) { return _mm512_set1_epi32(x); }
SLIP_INLINE V ifloat(IV x) { return _mm512_cvtepi32_ps(x); }
template <int SHIFT>
SLIP_INLINE __m512i shifted(__m512i x) {  // left by SHIFT, or right
    if constexpr (SHIFT > 0) return _mm512_slli_epi16(x, SHIFT);
    else if constexpr (SHIFT < 0) return _mm512_srli_epi16(x, -SHIFT);
    else return x;
}
// Columns 4 I .. 4 I + 3 of 16 rows.
template <int FORMAT, int I>
SLIP_INLINE __m512i code_group(const uint8_t* codes) {
    if constexpr (code_bits(FORMAT) == 8) {
        return _mm512_loadu_si512(codes + 64 * I);
    } else {
        const __m512i both = _mm512_loadu_si512(codes + 64 * (I / 2));
        const __m512i low = _mm512_and_si512(shifted<I % 2 ? -4 : 0>(both), _mm512_set1_epi8(15));
        if constexpr (code_bits(FORMAT) == 4) {
            return low;
        } else {
            constexpr int above = code_bits(FORMAT) - 4, at = above * (I % (8 / above));
            const __m512i high = shifted<4 - at>(_mm512_loadu_si512(codes + 256 + 64 * (above * I / 8)));
            const __m512i mask = _mm512_set1_epi8(((1 << above) - 1) << 4);
            return _mm512_ternarylogic_epi32(low, high, mask, 0xF8);  // low | (high & mask)
        }
    }
}
template <int FORMAT, int... I>
SLIP_INLINE Weights unpack_groups(const uint8_t* codes, std::integer_sequence<int, I...>) {
    return {{code_group<FORMAT, I>(codes)...}};
}
template <int FORMAT>
SLIP_INLINE Weights unpack(const uint8_t* codes) {
    return unpack_groups<FORMAT>(codes, std::make_integer_sequence<int, 8>());
}
SLIP_INLINE __m512i four_codes(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
// Add the products of groups BEGIN .. END of 4 columns.
template <int FORMAT, int BEGIN = 0, int END = 8>
SLIP_INLINE IV dot(IV acc, const Weights& u, const int8_t* x) {
    for (int i = BEGIN; i < END; ++i) acc = _mm512_dpbusd_epi32(acc, u.w[i], four_codes(x + 4 * i));
    return acc;
}

#elif SLIP_ISA == 1

constexpr int kTile = 4, kAbreast = 1;
constexpr int kDenseRows = 2, kDenseTile = 2;
struct IV {
    __m256i a, b;
};
struct Weights {
    const uint8_t* codes;
};
SLIP_INLINE IV iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SLIP_INLINE V ifloat(IV x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
template <int FORMAT>
SLIP_INLINE Weights unpack(const uint8_t* codes) {
    return {codes};
}
SLIP_INLINE __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
SLIP_INLINE __m256i four_codes(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
// Columns 4 i .. 4 i + 3 of 8 rows, codes below eight bits.
template <int FORMAT>
SLIP_INLINE __m256i code_group(const uint8_t* codes, int i) {
    const __m256i both = load32(codes + 64 * (i / 2));
    const __m256i low = _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    if constexpr (code_bits(FORMAT) == 4) {
        return low;
    } else {
        constexpr int above = code_bits(FORMAT) - 4;
        const int at = above * (i % (8 / above));
        const __m256i plane = load32(codes + 256 + 64 * (above * i / 8));
        const __m256i high = at <= 4 ? _mm256_slli_epi16(plane, 4 - at) : _mm256_srli_epi16(plane, at - 4);
        return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(((1 << above) - 1) << 4)));
    }
}
template <int FORMAT, int BEGIN, int END>
SLIP_INLINE __m256i dot_half(__m256i acc, const uint8_t* codes, const int8_t* x) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (code_bits(FORMAT) < 8) {  // a pair is at most 2 * 15 * 127, twice or four times that: all stay below 2^15
        constexpr int together = code_bits(FORMAT) == 4 ? 8 : code_bits(FORMAT) == 5 ? 4 : 2;
        for (int i = BEGIN; i < END; i += together) {
            __m256i pairs = _mm256_maddubs_epi16(code_group<FORMAT>(codes, i), four_codes(x + 4 * i));
            for (int j = i + 1; j < i + together; ++j)
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(code_group<FORMAT>(codes, j), four_codes(x + 4 * j)));
            acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones));
        }
        return acc;
    } else {  // |w| times x with w's sign: a pair is at most 2 * 128 * 127, below 2^15
        const __m256i flip = _mm256_set1_epi8(static_cast<char>(-128));
        for (int i = BEGIN; i < END; ++i) {
            const __m256i w = _mm256_xor_si256(load32(codes + 64 * i), flip);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four_codes(x + 4 * i), w));
            acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones));
        }
        return acc;
    }
}
template <int FORMAT, int BEGIN = 0, int END = 8>
SLIP_INLINE IV dot(IV acc, const Weights& u, const int8_t* x) {
    return {dot_half<FORMAT, BEGIN, END>(acc.a, u.codes, x), dot_half<FORMAT, BEGIN, END>(acc.b, u.codes + 32, x)};
}

#else

constexpr int kTile = 4, kAbreast = 1;
constexpr int kDenseRows = 2, kDenseTile = 2;
struct IV {
    int32_t x[16];
};
struct Weights {
    const uint8_t* codes;
};
SLIP_INLINE IV iset(int32_t x) {
    IV r;
    for (int i = 0; i < 16; ++i) r.x[i] = x;
    return r;
}
SLIP_INLINE V ifloat(const IV& a) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = static_cast<float>(a.x[i]);
    return r;
}
template <int FORMAT>
SLIP_INLINE Weights unpack(const uint8_t* codes) {
    return {codes};
}
template <int FORMAT, int BEGIN = 0, int END = 8>
SLIP_INLINE IV dot(IV acc, const Weights& u, const int8_t* x) {
    for (int i = BEGIN; i < END; ++i)
        for (int r = 0; r < 16; ++r)
            for (int c = 0; c < 4; ++c) acc.x[r] += panel_code(code_bits(FORMAT), u.codes, i, 4 * r + c) * x[4 * i + c];
    return acc;
}

#endif

// The same for R rows of activations, group by group: a row's sums wait for one another, two rows' do not. (On Zen 4 a row
// takes 11 cycles a block so, which is all that the multiplications need, and 12 when rows come one after another.)
template <int FORMAT, int R, int BEGIN = 0, int END = 8>
SLIP_INLINE void dot_rows(IV* acc, const Weights& u, const int8_t* x, int64_t stride) {
    if constexpr (R == 1) {
        acc[0] = dot<FORMAT, BEGIN, END>(acc[0], u, x);
    } else {
#if SLIP_ISA == 2
        for (int i = BEGIN; i < END; ++i)
            for (int r = 0; r < R; ++r) acc[r] = _mm512_dpbusd_epi32(acc[r], u.w[i], four_codes(x + r * stride + 4 * i));
#else
        for (int r = 0; r < R; ++r) acc[r] = dot<FORMAT, BEGIN, END>(acc[r], u, x + r * stride);
#endif
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
