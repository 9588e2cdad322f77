// Sixteen keys side by side: value after value, so that one vector has the same value of all of them.
#pragma once
#include <type_traits>

#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

#if SLIP_ISA == 2
// Turn 16 rows of 16 words, row by row, into 16 vectors, column by column.
SLIP_INLINE void transpose_words(__m512 (&a)[16]) {
    __m512 b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            const __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    for (int j = 0; j < 4; ++j) {
        const __m512 low0 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), high0 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xDD);
        const __m512 low1 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
        const __m512 high1 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xDD);
        b[j] = _mm512_shuffle_f32x4(low0, low1, 0x88);
        b[8 + j] = _mm512_shuffle_f32x4(low0, low1, 0xDD);
        b[4 + j] = _mm512_shuffle_f32x4(high0, high1, 0x88);
        b[12 + j] = _mm512_shuffle_f32x4(high0, high1, 0xDD);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
}
// Transpose `at` .. `at` + kSpan of 16 keys; a word of shorter keys holds two values.
template <class T>
constexpr int kSpan = sizeof(T) == 2 ? 32 : 16;
SLIP_INLINE void transpose16(const float* const* rows, int at, float* out) {
    __m512 a[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i] + at);
    transpose_words(a);
    for (int i = 0; i < 16; ++i) vstore(out + 16 * i, a[i]);
}
SLIP_INLINE void transpose16(const Eight* const* rows, int at, float* out) {
    __m512 a[16];
    for (int i = 0; i < 16; ++i) a[i] = vload_any(rows[i] + at);
    transpose_words(a);
    for (int i = 0; i < 16; ++i) vstore(out + 16 * i, a[i]);
}
SLIP_INLINE void transpose16(const Brain* const* rows, int at, float* out) {
    __m512 a[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
    transpose_words(a);
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
    for (int i = 0; i < 16; ++i) {
        const __m512i pair = _mm512_castps_si512(a[i]);
        vstore(out + 32 * i, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
        vstore(out + 32 * i + 16, _mm512_castsi512_ps(_mm512_and_si512(pair, high)));
    }
}
// Sixteen words of 16 keys, their first halves before their second.
template <class Store>
SLIP_INLINE void transpose_halves(const Half* const* rows, int at, Store store) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i apart = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(even)),
                                             _mm512_cvtepi32_epi16(_mm512_add_epi32(even, _mm512_set1_epi32(1))), 1);
    __m512 a[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
    transpose_words(a);
    for (int i = 0; i < 16; ++i) {
        store(i, _mm512_permutexvar_epi16(apart, _mm512_castps_si512(a[i])));
    }
}
SLIP_INLINE void transpose16(const Half* const* rows, int at, float* out) {
    transpose_halves(rows, at, [out](int i, __m512i halves) {
        vstore(out + 32 * i, _mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
        vstore(out + 32 * i + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
    });
}
SLIP_INLINE void transpose16(const Half* const* rows, int at, Half* out) {
    transpose_halves(rows, at, [out](int i, __m512i halves) { _mm512_storeu_si512(out + 32 * i, halves); });
}
#else
template <class T>
constexpr int kSpan = 16;
template <class T>
SLIP_INLINE void transpose16(const T* const* rows, int at, float* out) {
    alignas(32) float t[16][16];
    for (int lane = 0; lane < 16; ++lane) vstore(t[lane], vload_any(rows[lane] + at));
    for (int i = 0; i < 16; ++i)
        for (int lane = 0; lane < 16; ++lane) out[16 * i + lane] = t[lane][i];
}
#endif

// Keys by value, as floats or as they are.
template <class T, class K>
static void transpose_keys(const T* const* rows, int head_dim, K* out) {
    int at = 0;
    for (; at + kSpan<T> <= head_dim; at += kSpan<T>) transpose16(rows, at, out + 16 * at);
    for (; at < head_dim; at += 16) {
        const int left = head_dim - at < 16 ? head_dim - at : 16;
        for (int lane = 0; lane < 16; ++lane) {
            if constexpr (std::is_same<K, T>::value) {
                for (int i = 0; i < left; ++i) out[16 * (at + i) + lane] = rows[lane][at + i];
            } else {
                alignas(64) float t[16];
                vstore(t, vload_any_n(rows[lane] + at, left));
                for (int i = 0; i < left; ++i) out[16 * (at + i) + lane] = t[i];
            }
        }
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
