// Products y = x W^T with a weight kept in panels of 16 rows (integer codes) or as stored rows (float32, bf16, f16).
//
// A panel starts with its blocks' scales, filled up to 64-byte lines, so that memory is wanted in the order in which it
// lies: 16 half floats d, then, where blocks have a minimum, 16 half floats m. Formats whose half floats belong to 8 blocks
// (the K formats) have them once, and after them, block by block, two bytes a row: of Q4_K and Q5_K the scale and the
// minimum, to be multiplied by d and m (which is kept with its sign turned); of Q6_K the scales of columns 0..15 and 16..31.
//
// Then come, for each block of 32 columns, the codes of 16 rows side by side in groups of 4 columns, so that one 64-byte
// vector feeds 16 outputs at once. Four bits: byte 4 r + c of chunk j (64 bytes) has column 8 j + c of row r in its low
// half and column 8 j + 4 + c in its high half. Five bits: a chunk more, whose bit i is the fifth of column 4 i + c. Six
// bits: two more, of which number i / 4 has the upper two bits of column 4 i + c at bit 2 (i % 4). Eight bits: byte
// 4 r + c of chunk j is column 4 j + c of row r, plus 128. Rows past the last are zero.
//
// One output's sum runs over blocks from first to last with fused multiply-adds, whole numbers inside a block; dense
// outputs run over 16 lanes of columns and one tree. Neither depends on rows, threads or instruction set.
#pragma once
#include "activations.h"
#include "codes.h"

namespace slip {
namespace SLIP_NAMESPACE {

// Where results go: y[row, n - first], after the bias, added to what is there when `add`.
struct Output {
    float* y;
    int64_t stride;
    bool add;
    int first = 0;
};

SLIP_INLINE void emit(V sum, const Linear& w, const Output& out, int row, int n0) {
    const int n = w.n - n0;
    float* y = out.y + row * out.stride + (n0 - out.first);
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
    constexpr int kShare = code_bytes(FORMAT) + scale_share(FORMAT);
    const uint8_t* ahead = panel + static_cast<int64_t>(block) * kShare + kAhead;
    for (int line = 0; line < kShare; line += 64) __builtin_prefetch(ahead + line, 0, 2);
}

// What turns a block's whole numbers into its part of 16 outputs.
template <int FORMAT>
struct Scales {
    V d, minimum;     // of the block
    V first, second;  // of its halves
    V super_d = vzero(), super_minimum = vzero();

    // Blocks are read in order; half floats that 8 of them share are read with the first.
    SLIP_INLINE void read(Scales& s, const uint8_t* start, int block) {
        if constexpr (is_super(FORMAT)) {
            const uint8_t* shared = start + static_cast<int64_t>(block / kSuper) * kSuper * scale_share(FORMAT);
            if (block % kSuper == 0) read_halves(shared, s.super_d, s.super_minimum);
            const uint8_t* own = shared + half_bytes(FORMAT) + 32 * (block % kSuper);
            if constexpr (has_half_scales(FORMAT)) {
                s.d = s.super_d;
                s.first = vload_i8(reinterpret_cast<const int8_t*>(own));
                s.second = vload_i8(reinterpret_cast<const int8_t*>(own) + 16);
            } else {
                s.d = vmul(s.super_d, vload_u8(own));
                s.minimum = vmul(s.super_minimum, vload_u8(own + 16));
            }
        } else {
            read_halves(start + static_cast<int64_t>(block) * scale_share(FORMAT), s.d, s.minimum);
        }
    }

    SLIP_INLINE void read_halves(const uint8_t* at, V& d, V& minimum) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
        d = vload_f16(halves);
        if constexpr (has_minimum(FORMAT)) minimum = vload_f16(halves + 16);
    }
};

// A block's sum of products, scales of halves multiplied in. They are bytes and the sums below 2^17, so that both products
// and their sum are whole numbers below 2^24, which floats hold exactly.
template <int FORMAT, int R>
SLIP_INLINE void whole_sums(const Weights& u, const Scales<FORMAT>& s, const int8_t* x, int64_t stride, const int32_t* start, V* whole) {
    const int64_t starts = stride / 32;
    IV sum[R];
    if constexpr (has_half_scales(FORMAT)) {
        IV second[R];
        for (int r = 0; r < R; ++r) {
            sum[r] = iset(start[2 * r * starts]);
            second[r] = iset(start[2 * r * starts + 1]);
        }
        dot_rows<FORMAT, R, 0, 4>(sum, u, x, stride);
        dot_rows<FORMAT, R, 4, 8>(second, u, x, stride);
        for (int r = 0; r < R; ++r) whole[r] = vfma(ifloat(sum[r]), s.first, vmul(ifloat(second[r]), s.second));
    } else {
        for (int r = 0; r < R; ++r) sum[r] = iset(has_minimum(FORMAT) ? 0 : start[r * starts]);
        dot_rows<FORMAT, R>(sum, u, x, stride);
        for (int r = 0; r < R; ++r) whole[r] = ifloat(sum[r]);
    }
}

// Add a block's part to the sums of R rows.
template <int FORMAT, int R>
SLIP_INLINE void add_block(const Weights& u, const Scales<FORMAT>& s, const Activations& a, int64_t at, V* sum) {
    constexpr int kStarts = has_half_scales(FORMAT) ? 2 : 1;
    V whole[R];
    whole_sums<FORMAT, R>(u, s, a.codes + at * 32, 32 * static_cast<int64_t>(a.blocks), a.start + kStarts * at, whole);
    for (int r = 0; r < R; ++r, at += a.blocks) {
        sum[r] = vfma(whole[r], vmul(s.d, vset(a.scale[at])), sum[r]);
        if constexpr (has_minimum(FORMAT)) sum[r] = vfma(s.minimum, vset(a.scaled_sum[at]), sum[r]);
    }
}

// Go through M rows, kAbreast at a time.
template <int M, class Body>
SLIP_INLINE void for_rows(Body body) {
    for (int m = 0; m + kAbreast <= M; m += kAbreast) body(std::integral_constant<int, kAbreast>(), m);
    if constexpr (M % kAbreast != 0) body(std::integral_constant<int, M % kAbreast>(), M - M % kAbreast);
}

template <int FORMAT, int M>
static void panel_rows(const Linear& w, const Activations& a, int row, int panel, const Output& out) {
    const int blocks = a.blocks;
    const uint8_t* start = static_cast<const uint8_t*>(w.weight) + panel * panel_bytes(FORMAT, blocks);
    const uint8_t* codes = start + scale_bytes(FORMAT, blocks);
    const int64_t base = static_cast<int64_t>(row) * blocks;
    if constexpr (is_per_token(FORMAT)) {
        IV sum[M];
        for (int m = 0; m < M; ++m) sum[m] = iset(a.start[row + m]);
        for (int b = 0; b < blocks; ++b) {
            const Weights u = unpack<FORMAT>(codes + static_cast<int64_t>(b) * code_bytes(FORMAT));
            if (row == 0) prefetch_block<FORMAT>(start, b);
            for_rows<M>([&](auto rows, int m) {
                dot_rows<FORMAT, rows.value>(sum + m, u, a.codes + (base + static_cast<int64_t>(m) * blocks + b) * 32, 32 * static_cast<int64_t>(blocks));
            });
        }
        const V scale = vload(w.scale + 16 * panel);
        for (int m = 0; m < M; ++m)
            emit(vmul(ifloat(sum[m]), vmul(vset(a.scale[row + m]), scale)), w, out, row + m, 16 * panel);
    } else {
        V sum[M];
        Scales<FORMAT> s;
        for (int m = 0; m < M; ++m) sum[m] = vzero();
        for (int b = 0; b < blocks; ++b) {
            const Weights u = unpack<FORMAT>(codes + static_cast<int64_t>(b) * code_bytes(FORMAT));
            if (row == 0) prefetch_block<FORMAT>(start, b);
            Scales<FORMAT>::read(s, start, b);
            for_rows<M>([&](auto rows, int m) { add_block<FORMAT, rows.value>(u, s, a, base + static_cast<int64_t>(m) * blocks + b, sum + m); });
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
            float* y = out.y + (row + m) * out.stride + (n0 + n - out.first);
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

static void run_product(const Linear& w, const Activations& a, int rows, int begin, int end, const Output& out) {
    const int last = 16 * end < w.n ? 16 * end : w.n;
    switch (w.format) {
        case F32: return dense_product<F32>(w, a, rows, 16 * begin, last, out);
        case BF16: return dense_product<BF16>(w, a, rows, 16 * begin, last, out);
        case F16: return dense_product<F16>(w, a, rows, 16 * begin, last, out);
        case Q4_1: return panel_tiles<Q4_1>(w, a, rows, begin, end, out);
        case Q4_0: return panel_tiles<Q4_0>(w, a, rows, begin, end, out);
        case Q8_0: return panel_tiles<Q8_0>(w, a, rows, begin, end, out);
        case Q4_K: return panel_tiles<Q4_K>(w, a, rows, begin, end, out);
        case Q5_K: return panel_tiles<Q5_K>(w, a, rows, begin, end, out);
        case Q6_K: return panel_tiles<Q6_K>(w, a, rows, begin, end, out);
        case Q5_0: return panel_tiles<Q5_0>(w, a, rows, begin, end, out);
        case Q5_1: return panel_tiles<Q5_1>(w, a, rows, begin, end, out);
        case W8A8: return panel_tiles<W8A8>(w, a, rows, begin, end, out);
        default: return panel_tiles<W4A8>(w, a, rows, begin, end, out);
    }
}

SLIP_INLINE int run_panels(const Linear& w) { return (w.n + 15) / 16; }

// Outputs and panels of a weight, of all its runs.
SLIP_INLINE int num_outputs(const Linear& w) {
    int outputs = 0;
    for (const Linear* run = &w; run; run = run->rest) outputs += run->n;
    return outputs;
}
SLIP_INLINE int num_panels(const Linear& w) { return (num_outputs(w) + 15) / 16; }

// Compute outputs 16 begin .. 16 end of every row.
static void product(const Linear& w, const Activations& a, int rows, int begin, int end, const Output& out) {
    Activations read = a;
    Output into = out;
    for (const Linear* run = &w; run && end > 0; run = run->rest) {
        const int panels = run_panels(*run);
        if (begin < panels) run_product(*run, read, rows, begin, end < panels ? end : panels, into);
        begin = begin < panels ? 0 : begin - panels;
        end -= panels;
        into.y += run->n;
        read.start += read.run_starts;
    }
}

// Ask for the beginning of what a member will read of a weight, before it is its turn.
static void prefetch_start(const Linear& w, int first_panel) {
    const Linear* run = &w;
    for (; run->rest && first_panel >= run_panels(*run); run = run->rest) first_panel -= run_panels(*run);
    if (is_dense(run->format)) return;
    const char* p = static_cast<const char*>(run->weight) + first_panel * panel_bytes(run->format, num_blocks(run->k));
    for (int line = 0; line < kAhead; line += 64) __builtin_prefetch(p + line, 0, 2);
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
