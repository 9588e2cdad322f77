// Products y = x W^T with a weight kept in panels of 16 rows (integer codes) or as stored rows (float32, bf16, f16).
//
// A panel starts with its blocks' scales (16 half floats d, then, for Q4_1, 16 half floats m), filled up to 64-byte lines,
// so that memory is wanted in the order in which it lies. Then come, for each block of 32 columns, the codes of 16 rows
// side by side in groups of 4 columns, so that one 64-byte vector feeds 16 outputs at once. Four-bit codes: byte 4 r + c
// of chunk j (64 bytes) has column 8 j + c of row r in its low half and column 8 j + 4 + c in its high half. Eight-bit
// codes: byte 4 r + c of chunk j is column 4 j + c of row r, plus 128. Rows past the last are zero.
//
// One output's sum runs over blocks from first to last with fused multiply-adds, integers inside a block; dense
// outputs run over 16 lanes of columns and one tree. Neither depends on rows, threads or instruction set.
#pragma once
#include "activations.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int code_bytes(int format) { return is_four_bit(format) ? 256 : 512; }
constexpr int scale_halves(int format) { return format == Q4_1 ? 32 : is_per_token(format) ? 0 : 16; }
SLIP_INLINE int64_t scale_bytes(int format, int64_t blocks) { return (blocks * 2 * scale_halves(format) + 63) / 64 * 64; }
SLIP_INLINE int64_t panel_bytes(int format, int64_t blocks) {
    return scale_bytes(format, blocks) + blocks * code_bytes(format);
}

#if SLIP_ISA == 2

constexpr int kTile = 12;
constexpr int kDenseRows = 4, kDenseTile = 4;
using IV = __m512i;
struct Weights {
    __m512i w[8];
};
SLIP_INLINE IV iset(int32_t x) { return _mm512_set1_epi32(x); }
SLIP_INLINE V ifloat(IV x) { return _mm512_cvtepi32_ps(x); }
template <int FORMAT>
SLIP_INLINE Weights unpack(const uint8_t* codes) {
    Weights u;
    if constexpr (is_four_bit(FORMAT)) {
        const __m512i low = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; ++j) {
            const __m512i c = _mm512_loadu_si512(codes + 64 * j);
            u.w[2 * j] = _mm512_and_si512(c, low);
            u.w[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(c, 4), low);
        }
    } else {
        for (int j = 0; j < 8; ++j) u.w[j] = _mm512_loadu_si512(codes + 64 * j);
    }
    return u;
}
SLIP_INLINE __m512i four_codes(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
template <int FORMAT>
SLIP_INLINE IV dot(IV acc, const Weights& u, const int8_t* x) {
    for (int j = 0; j < 8; ++j) acc = _mm512_dpbusd_epi32(acc, u.w[j], four_codes(x + 4 * j));
    return acc;
}

#elif SLIP_ISA == 1

constexpr int kTile = 4;
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
template <int FORMAT>
SLIP_INLINE __m256i dot_half(__m256i acc, const uint8_t* codes, const int8_t* x) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (is_four_bit(FORMAT)) {  // 8 pairs of at most 2 * 15 * 127 stay below 2^15
        const __m256i low = _mm256_set1_epi8(15);
        __m256i pairs = _mm256_setzero_si256();
        for (int j = 0; j < 4; ++j) {
            const __m256i c = load32(codes + 64 * j);
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(_mm256_and_si256(c, low), four_codes(x + 8 * j)));
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(c, 4), low),
                                                                 four_codes(x + 8 * j + 4)));
        }
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones));
    } else {  // |w| times x with w's sign: a pair is at most 2 * 128 * 127, below 2^15
        const __m256i flip = _mm256_set1_epi8(static_cast<char>(-128));
        for (int j = 0; j < 8; ++j) {
            const __m256i w = _mm256_xor_si256(load32(codes + 64 * j), flip);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four_codes(x + 4 * j), w));
            acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones));
        }
        return acc;
    }
}
template <int FORMAT>
SLIP_INLINE IV dot(IV acc, const Weights& u, const int8_t* x) {
    return {dot_half<FORMAT>(acc.a, u.codes, x), dot_half<FORMAT>(acc.b, u.codes + 32, x)};
}

#else

constexpr int kTile = 4;
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
template <int FORMAT>
SLIP_INLINE IV dot(IV acc, const Weights& u, const int8_t* x) {
    for (int j = 0; j < (is_four_bit(FORMAT) ? 4 : 8); ++j)
        for (int r = 0; r < 16; ++r)
            for (int c = 0; c < 4; ++c) {
                const int code = u.codes[64 * j + 4 * r + c];
                if constexpr (is_four_bit(FORMAT))
                    acc.x[r] += (code & 15) * x[8 * j + c] + (code >> 4) * x[8 * j + 4 + c];
                else
                    acc.x[r] += code * x[4 * j + c];
            }
    return acc;
}

#endif

// Where results go: y[row, n], after the bias, added to what is there when `add`.
struct Output {
    float* y;
    int64_t stride;
    bool add;
};

SLIP_INLINE void emit(V sum, const Linear& w, const Output& out, int row, int n0) {
    const int n = w.n - n0;
    float* y = out.y + row * out.stride + n0;
    if (n >= 16) {
        if (w.bias) sum = vadd(sum, vload(w.bias + n0));
        vstore(y, out.add ? vadd(vload(y), sum) : sum);
    } else {
        if (w.bias) sum = vadd(sum, vload_n(w.bias + n0, n));
        vstore_n(y, out.add ? vadd(vload_n(y, n), sum) : sum, n);
    }
}

constexpr int kAhead = 8192;

// Weights come from memory once a step; ask for them well before the hardware, which stops at every 4 KiB, would. They go
// to the second cache, which can wait for more lines at once than the first. Each block asks for its share of a panel's
// bytes, codes and scales alike, so that nothing is left out or asked for twice.
template <int FORMAT>
SLIP_INLINE void prefetch_block(const uint8_t* panel, int block) {
    constexpr int kShare = code_bytes(FORMAT) + 2 * scale_halves(FORMAT);
    const uint8_t* ahead = panel + static_cast<int64_t>(block) * kShare + kAhead;
    for (int line = 0; line < kShare; line += 64) __builtin_prefetch(ahead + line, 0, 2);
}

// Ask for the beginning of what a member will read of a weight, before it is its turn.
static void prefetch_start(const Linear& w, int first_panel) {
    if (is_dense(w.format)) return;
    const char* p = static_cast<const char*>(w.weight) + first_panel * panel_bytes(w.format, num_blocks(w.k));
    for (int line = 0; line < kAhead; line += 64) __builtin_prefetch(p + line, 0, 2);
}

template <int FORMAT, int M>
static void panel_rows(const Linear& w, const Activations& a, int row, int panel, const Output& out) {
    const int blocks = a.blocks;
    const uint8_t* start = static_cast<const uint8_t*>(w.weight) + panel * panel_bytes(FORMAT, blocks);
    const uint8_t* codes = start + scale_bytes(FORMAT, blocks);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(start);
    const int64_t base = static_cast<int64_t>(row) * blocks;
    if constexpr (is_per_token(FORMAT)) {
        IV sum[M];
        for (int m = 0; m < M; ++m) sum[m] = iset(a.start[row + m]);
        for (int b = 0; b < blocks; ++b) {
            const Weights u = unpack<FORMAT>(codes + static_cast<int64_t>(b) * code_bytes(FORMAT));
            if (row == 0) prefetch_block<FORMAT>(start, b);
            for (int m = 0; m < M; ++m)
                sum[m] = dot<FORMAT>(sum[m], u, a.codes + (base + static_cast<int64_t>(m) * blocks + b) * 32);
        }
        const V scale = vload(w.scale + 16 * panel);
        for (int m = 0; m < M; ++m)
            emit(vmul(ifloat(sum[m]), vmul(vset(a.scale[row + m]), scale)), w, out, row + m, 16 * panel);
    } else {
        V sum[M];
        for (int m = 0; m < M; ++m) sum[m] = vzero();
        for (int b = 0; b < blocks; ++b) {
            const Weights u = unpack<FORMAT>(codes + static_cast<int64_t>(b) * code_bytes(FORMAT));
            if (row == 0) prefetch_block<FORMAT>(start, b);
            const V d = vload_f16(halves + b * scale_halves(FORMAT));
            for (int m = 0; m < M; ++m) {
                const int64_t at = base + static_cast<int64_t>(m) * blocks + b;
                const V whole = ifloat(dot<FORMAT>(iset(FORMAT == Q4_1 ? 0 : a.start[at]), u, a.codes + at * 32));
                sum[m] = vfma(whole, vmul(d, vset(a.scale[at])), sum[m]);
                if constexpr (FORMAT == Q4_1)
                    sum[m] = vfma(vload_f16(halves + b * scale_halves(FORMAT) + 16), vset(a.scaled_sum[at]), sum[m]);
            }
        }
        for (int m = 0; m < M; ++m) emit(sum[m], w, out, row + m, 16 * panel);
    }
}

// A tile of `tile` rows, of which M is the size still looked for.
template <int FORMAT, int M>
static void panel_tile(const Linear& w, const Activations& a, int row, int tile, int begin, int end, const Output& out) {
    if constexpr (M > 1) {
        if (tile < M) return panel_tile<FORMAT, M - 1>(w, a, row, tile, begin, end, out);
    }
    for (int panel = begin; panel < end; ++panel) panel_rows<FORMAT, M>(w, a, row, panel, out);
}

// Rows go in tiles of about the same size: a last tile of one row would cost as much as one of three.
template <int FORMAT>
static void panel_tiles(const Linear& w, const Activations& a, int rows, int begin, int end, const Output& out) {
    for (int row = 0; row < rows;) {
        const int left = rows - row, tiles = (left + kTile - 1) / kTile, tile = (left + tiles - 1) / tiles;
        panel_tile<FORMAT, kTile>(w, a, row, tile, begin, end, out);
        row += tile;
    }
}

template <int FORMAT>
SLIP_INLINE V load_weights(const void* p, int64_t at) {
    if constexpr (FORMAT == F32) return vload(static_cast<const float*>(p) + at);
    else if constexpr (FORMAT == BF16) return vload_bf16(static_cast<const uint16_t*>(p) + at);
    else return vload_f16(static_cast<const uint16_t*>(p) + at);
}

template <int FORMAT>
SLIP_INLINE V load_weights_n(const void* p, int64_t at, int n) {
    if constexpr (FORMAT == F32) {
        return vload_n(static_cast<const float*>(p) + at, n);
    } else {
        uint16_t t[16] = {0};
        std::memcpy(t, static_cast<const uint16_t*>(p) + at, sizeof(uint16_t) * static_cast<size_t>(n));
        return load_weights<FORMAT>(t, 0);
    }
}

template <int FORMAT, int N, int M>
SLIP_INLINE void dense_tile(const Linear& w, const Activations& a, int row, int n0, const Output& out) {
    V sum[N][M];
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) sum[n][m] = vzero();
    const int whole = w.k & ~15;
    const float* x = a.x + row * a.stride;
    for (int k = 0; k < whole; k += 16) {
        V weights[N];
        for (int n = 0; n < N; ++n) weights[n] = load_weights<FORMAT>(w.weight, static_cast<int64_t>(n0 + n) * w.k + k);
        for (int m = 0; m < M; ++m) {
            const V values = vload(x + m * a.stride + k);
            for (int n = 0; n < N; ++n) sum[n][m] = vfma(weights[n], values, sum[n][m]);
        }
    }
    if (whole < w.k)
        for (int n = 0; n < N; ++n) {
            const V weights = load_weights_n<FORMAT>(w.weight, static_cast<int64_t>(n0 + n) * w.k + whole, w.k - whole);
            for (int m = 0; m < M; ++m)
                sum[n][m] = vfma(weights, vload_n(x + m * a.stride + whole, w.k - whole), sum[n][m]);
        }
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) {
            float* y = out.y + (row + m) * out.stride + n0 + n;
            float value = vsum(sum[n][m]);
            if (w.bias) value += w.bias[n0 + n];
            *y = out.add ? *y + value : value;
        }
}

// All rows against N outputs before the next N: these weights stay in the first cache, and are read from memory once.
template <int FORMAT, int N, int M>
static void dense_rows(const Linear& w, const Activations& a, int row, int rows, int n, const Output& out) {
    for (; row + M <= rows; row += M) dense_tile<FORMAT, N, M>(w, a, row, n, out);
    if constexpr (M > 1) {
        if (row < rows) dense_rows<FORMAT, N, M - 1>(w, a, row, rows, n, out);
    }
}

// Rows go in blocks that fit the second cache, so up to 64 of them read the weights from memory once.
template <int FORMAT>
static void dense_product(const Linear& w, const Activations& a, int rows, int begin, int end, const Output& out) {
    constexpr int kRowBlock = 64;
    for (int row = 0; row < rows; row += kRowBlock) {
        const int stop = row + kRowBlock < rows ? row + kRowBlock : rows;
        int n = begin;
        for (; n + kDenseRows <= end; n += kDenseRows) dense_rows<FORMAT, kDenseRows, kDenseTile>(w, a, row, stop, n, out);
        for (; n < end; ++n) dense_rows<FORMAT, 1, kDenseTile>(w, a, row, stop, n, out);
    }
}

SLIP_INLINE int num_panels(const Linear& w) { return (w.n + 15) / 16; }

// Compute outputs 16 begin .. 16 end of every row.
static void product(const Linear& w, const Activations& a, int rows, int begin, int end, const Output& out) {
    const int last = 16 * end < w.n ? 16 * end : w.n;
    switch (w.format) {
        case F32: return dense_product<F32>(w, a, rows, 16 * begin, last, out);
        case BF16: return dense_product<BF16>(w, a, rows, 16 * begin, last, out);
        case F16: return dense_product<F16>(w, a, rows, 16 * begin, last, out);
        case Q4_1: return panel_tiles<Q4_1>(w, a, rows, begin, end, out);
        case Q4_0: return panel_tiles<Q4_0>(w, a, rows, begin, end, out);
        case Q8_0: return panel_tiles<Q8_0>(w, a, rows, begin, end, out);
        case W8A8: return panel_tiles<W8A8>(w, a, rows, begin, end, out);
        default: return panel_tiles<W4A8>(w, a, rows, begin, end, out);
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
