// Sixteen floats as one value, for each instruction set. Every operation gives the same bits on all of them: the same
// lanes, fused multiply-adds, correctly rounded divisions and square roots, and one tree for the sum over lanes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if SLIP_ISA > 0
#include <immintrin.h>
#endif

namespace slip {
namespace SLIP_NAMESPACE {

#define SLIP_INLINE static inline __attribute__((always_inline))

// Numbers of 16 bits, told apart by type: bfloat16, and IEEE half precision.
struct Brain {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};
constexpr float kHalfMax = 65504.0f;
// E4M3: four bits of exponent, three of mantissa, no infinities.
struct Eight {
    uint8_t bits;
};
constexpr float kEightMax = 448.0f;
constexpr int kEightShift = 8;  // codes are loaded as so many powers of two less than they are: half precision's bias

#if SLIP_ISA == 2

using V = __m512;
SLIP_INLINE __mmask16 first(int n) { return static_cast<__mmask16>(n >= 16 ? 0xFFFFu : (1u << n) - 1u); }
SLIP_INLINE V vzero() { return _mm512_setzero_ps(); }
SLIP_INLINE V vset(float x) { return _mm512_set1_ps(x); }
SLIP_INLINE V vload(const float* p) { return _mm512_loadu_ps(p); }
SLIP_INLINE V vload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
SLIP_INLINE void vstore(float* p, V x) { _mm512_storeu_ps(p, x); }
SLIP_INLINE void vstore_n(float* p, V x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
SLIP_INLINE V vadd(V a, V b) { return _mm512_add_ps(a, b); }
SLIP_INLINE V vsub(V a, V b) { return _mm512_sub_ps(a, b); }
SLIP_INLINE V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
SLIP_INLINE V vdiv(V a, V b) { return _mm512_div_ps(a, b); }
SLIP_INLINE V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
SLIP_INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
SLIP_INLINE V vmin(V a, V b) { return _mm512_min_ps(a, b); }
SLIP_INLINE V vabs(V a) { return _mm512_abs_ps(a); }
SLIP_INLINE V vround(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SLIP_INLINE V vexp2i(V n) {  // 2^n for whole n in [-126, 127]
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
SLIP_INLINE __m256 vhalf(V a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
SLIP_INLINE V vload_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
SLIP_INLINE V vload_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
SLIP_INLINE V vload_e4m3(const uint8_t* p) {  // over 2^kEightShift
    const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
    return _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x7F)), 7)));
}
SLIP_INLINE V vload_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
SLIP_INLINE V vload_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
SLIP_INLINE void vstore_f16(uint16_t* p, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
using CodeSum = __m512i;
SLIP_INLINE CodeSum no_codes() { return _mm512_setzero_si512(); }
SLIP_INLINE CodeSum vstore_codes(int8_t* p, V x, CodeSum sum) {  // round half to even, store int8, add to their sum
    const __m512i codes = _mm512_cvtps_epi32(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(codes));
    return _mm512_add_epi32(sum, codes);
}
SLIP_INLINE int total(CodeSum sum) { return _mm512_reduce_add_epi32(sum); }

#elif SLIP_ISA == 1

struct V {
    __m256 a, b;
};
SLIP_INLINE V vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SLIP_INLINE V vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SLIP_INLINE V vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SLIP_INLINE V vload_n(const float* p, int n) {
    alignas(32) float t[16] = {0};
    std::memcpy(t, p, sizeof(float) * static_cast<size_t>(n < 16 ? n : 16));
    return vload(t);
}
SLIP_INLINE void vstore(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
SLIP_INLINE void vstore_n(float* p, V x, int n) {
    alignas(32) float t[16];
    vstore(t, x);
    std::memcpy(p, t, sizeof(float) * static_cast<size_t>(n < 16 ? n : 16));
}
SLIP_INLINE V vadd(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
SLIP_INLINE V vsub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
SLIP_INLINE V vmul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
SLIP_INLINE V vdiv(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
SLIP_INLINE V vfma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
SLIP_INLINE V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
SLIP_INLINE V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
SLIP_INLINE V vabs(V x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
SLIP_INLINE V vround(V x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
SLIP_INLINE __m256 exp2i8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
SLIP_INLINE V vexp2i(V n) { return {exp2i8(n.a), exp2i8(n.b)}; }
SLIP_INLINE __m256 vhalf(V x) { return _mm256_add_ps(x.a, x.b); }
SLIP_INLINE __m256 bf16x8(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
SLIP_INLINE V vload_bf16(const uint16_t* p) { return {bf16x8(p), bf16x8(p + 8)}; }
SLIP_INLINE V vload_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
SLIP_INLINE __m128i load8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
SLIP_INLINE __m256 e4m3x8(const uint8_t* p) {
    const __m128i code = _mm_cvtepu8_epi16(load8(p));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(code, _mm_set1_epi16(0x80)), 8);
    return _mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(code, _mm_set1_epi16(0x7F)), 7)));
}
SLIP_INLINE V vload_e4m3(const uint8_t* p) { return {e4m3x8(p), e4m3x8(p + 8)}; }
SLIP_INLINE V vload_u8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load8(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load8(p + 8)))};
}
SLIP_INLINE V vload_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(p + 8)))};
}
SLIP_INLINE void vstore_f16(uint16_t* p, V x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
using CodeSum = __m256i;
SLIP_INLINE CodeSum no_codes() { return _mm256_setzero_si256(); }
SLIP_INLINE CodeSum vstore_codes(int8_t* p, V x, CodeSum sum) {
    const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    return _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
}
SLIP_INLINE int total(CodeSum sum) {
    alignas(32) int32_t t[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(t), sum);
    return t[0] + t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7];
}

#else

struct V {
    float x[16];
};
#define SLIP_EACH(expression)                      \
    V r;                                           \
    for (int i = 0; i < 16; ++i) r.x[i] = (expression); \
    return r
SLIP_INLINE V vset(float x) { SLIP_EACH(x); }
SLIP_INLINE V vzero() { return vset(0.0f); }
SLIP_INLINE V vload(const float* p) { SLIP_EACH(p[i]); }
SLIP_INLINE V vload_n(const float* p, int n) { SLIP_EACH(i < n ? p[i] : 0.0f); }
SLIP_INLINE void vstore(float* p, const V& a) { std::memcpy(p, a.x, sizeof(a.x)); }
SLIP_INLINE void vstore_n(float* p, const V& a, int n) {
    std::memcpy(p, a.x, sizeof(float) * static_cast<size_t>(n < 16 ? n : 16));
}
SLIP_INLINE V vadd(const V& a, const V& b) { SLIP_EACH(a.x[i] + b.x[i]); }
SLIP_INLINE V vsub(const V& a, const V& b) { SLIP_EACH(a.x[i] - b.x[i]); }
SLIP_INLINE V vmul(const V& a, const V& b) { SLIP_EACH(a.x[i] * b.x[i]); }
SLIP_INLINE V vdiv(const V& a, const V& b) { SLIP_EACH(a.x[i] / b.x[i]); }
SLIP_INLINE V vfma(const V& a, const V& b, const V& c) { SLIP_EACH(__builtin_fmaf(a.x[i], b.x[i], c.x[i])); }
SLIP_INLINE V vmax(const V& a, const V& b) { SLIP_EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
SLIP_INLINE V vmin(const V& a, const V& b) { SLIP_EACH(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
SLIP_INLINE V vabs(const V& a) { SLIP_EACH(__builtin_fabsf(a.x[i])); }
SLIP_INLINE V vround(const V& a) { SLIP_EACH(__builtin_nearbyintf(a.x[i])); }
SLIP_INLINE float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
SLIP_INLINE V vexp2i(const V& n) { SLIP_EACH(bits_to_float(static_cast<uint32_t>(static_cast<int>(n.x[i]) + 127) << 23)); }
SLIP_INLINE V vload_bf16(const uint16_t* p) { SLIP_EACH(bits_to_float(static_cast<uint32_t>(p[i]) << 16)); }
SLIP_INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 1023u;
    if (exponent == 31u) return bits_to_float(sign | 0x7F800000u | (mantissa << 13));
    if (exponent == 0u) {
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -magnitude : magnitude;
    }
    return bits_to_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}
SLIP_INLINE V vload_f16(const uint16_t* p) { SLIP_EACH(half_to_float(p[i])); }
SLIP_INLINE V vload_e4m3(const uint8_t* p) {
    SLIP_EACH(half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7)));
}
SLIP_INLINE V vload_u8(const uint8_t* p) { SLIP_EACH(static_cast<float>(p[i])); }
SLIP_INLINE V vload_i8(const int8_t* p) { SLIP_EACH(static_cast<float>(p[i])); }
SLIP_INLINE uint16_t float_to_half(float x) {  // half to even, as the instruction rounds
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((size >> 13) & 0x3FFu));
    if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // nearer to 65536 than to 65504
    if (size < 0x38800000u)  // below 2^-14: whole multiples of 2^-24
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_nearbyintf(__builtin_fabsf(x) * 16777216.0f)));
    return static_cast<uint16_t>(sign | ((size + 0xFFFu + ((size >> 13) & 1u) - 0x38000000u) >> 13));
}
SLIP_INLINE void vstore_f16(uint16_t* p, const V& a) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.x[i]);
}
using CodeSum = int;
SLIP_INLINE CodeSum no_codes() { return 0; }
SLIP_INLINE int total(CodeSum sum) { return sum; }
SLIP_INLINE CodeSum vstore_codes(int8_t* p, const V& a, CodeSum sum) {
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int8_t>(__builtin_nearbyintf(a.x[i]));
        sum += p[i];
    }
    return sum;
}
#undef SLIP_EACH

#endif

// Call body(0), .. body(N - 1) with constants, so that arrays it indexes by them can stay in registers throughout.
template <class Body, int... I>
SLIP_INLINE void call_each(const Body& body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
SLIP_INLINE void unrolled(const Body& body) {
    call_each(body, std::make_integer_sequence<int, N>());
}
#define SLIP_UNROLLED [&](auto i) __attribute__((always_inline))

SLIP_INLINE uint16_t to_bf16(float x) {  // half to even, as torch rounds
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Sixteen values of any type as floats; n of them, the rest zero.
SLIP_INLINE V vload_any(const float* p) { return vload(p); }
SLIP_INLINE V vload_any(const Brain* p) { return vload_bf16(&p->bits); }
SLIP_INLINE V vload_any(const Half* p) { return vload_f16(&p->bits); }
SLIP_INLINE V vload_any(const Eight* p) { return vload_e4m3(&p->bits); }
SLIP_INLINE V vload_any_n(const float* p, int n) { return vload_n(p, n); }
template <class T>
SLIP_INLINE V vload_any_n(const T* p, int n) {
    T t[16] = {};
    std::memcpy(t, p, sizeof(T) * static_cast<size_t>(n < 16 ? n : 16));
    return vload_any(t);
}
SLIP_INLINE void store_span(float* to, const float* from, int n) { std::memcpy(to, from, sizeof(float) * static_cast<size_t>(n)); }
SLIP_INLINE void store_span(Brain* to, const float* from, int n) {
    for (int i = 0; i < n; ++i) to[i].bits = to_bf16(from[i]);
}
// Numbers beyond half precision become its largest; the limits come first, so that what is no number stays none.
SLIP_INLINE V within_half(V x) { return vmax(vset(-kHalfMax), vmin(vset(kHalfMax), x)); }
SLIP_INLINE void store_span(Half* to, const float* from, int n) {
    for (int i = 0; i < n; i += 16) {
        if (n - i >= 16) {
            vstore_f16(&to[i].bits, within_half(vload(from + i)));
        } else {
            uint16_t t[16];
            vstore_f16(t, within_half(vload_n(from + i, n - i)));
            std::memcpy(to + i, t, sizeof(uint16_t) * static_cast<size_t>(n - i));
        }
    }
}

// The one tree: lane i with i + 8, then + 4, + 2, + 1.
SLIP_INLINE float vsum(V a) {
#if SLIP_ISA > 0
    const __m256 eight = vhalf(a);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) a.x[i] += a.x[i + step];
    return a.x[0];
#endif
}

SLIP_INLINE float vmax_lane(V a) {
#if SLIP_ISA > 0
#if SLIP_ISA == 2
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#else
    const __m256 eight = _mm256_max_ps(a.a, a.b);
#endif
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) a.x[i] = a.x[i] > a.x[i + step] ? a.x[i] : a.x[i + step];
    return a.x[0];
#endif
}

SLIP_INLINE float power_of_two(int exponent) {  // from -126 to 127
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
SLIP_INLINE uint8_t to_e4m3(float x) {  // half to even; of a number within 448
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 24) & 0x80u, size = bits & 0x7FFFFFFFu;
    if (size < 0x3C800000u)  // below 2^-6: whole multiples of 2^-9
        return static_cast<uint8_t>(sign | static_cast<uint32_t>(__builtin_nearbyintf(__builtin_fabsf(x) * 512.0f)));
    return static_cast<uint8_t>(sign | ((size + 0x7FFFFu + ((size >> 20) & 1u) - 0x3C000000u) >> 20));
}
// Store codes of numbers and return their scale: see ../../reference/kv_fp8.py.
SLIP_INLINE uint8_t store_scaled(Eight* to, const float* from, int n) {
    V most = vzero();
    for (int i = 0; i < n; i += 16) most = vmax(most, vabs(n - i < 16 ? vload_n(from + i, n - i) : vload(from + i)));
    const float largest = vmax_lane(most);
    int32_t bits;
    std::memcpy(&bits, &largest, 4);
    int scale = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000 ? 1 : 0);
    scale = scale < 1 ? 1 : scale > 246 ? 246 : scale;
    const float inverse = power_of_two(127 - scale);
    for (int i = 0; i < n; ++i) {
        const float x = from[i] * inverse;
        to[i].bits = to_e4m3(x > kEightMax ? kEightMax : x < -kEightMax ? -kEightMax : x);
    }
    return static_cast<uint8_t>(scale);
}

// exp(x), within 2 units in the last place; x is held to [-87.3, 88.3].
SLIP_INLINE V vexp(V x) {
    x = vmin(vmax(x, vset(-87.3f)), vset(88.3f));
    const V n = vround(vmul(x, vset(1.44269504088896341f)));
    V r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    V p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, vmul(r, r), vadd(r, vset(1.0f)));
    return vmul(p, vexp2i(n));
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
