// Paged attention over trees of query tokens.
//
// The keys a token sees are counted in order: its r-th visible key has rank r. Scores are dot products over the head's
// values from first to last; the softmax's sum runs over 16 lanes by rank and one tree; values are added by rank. So a
// token's bits depend only on the keys it sees: not on pages, on what else shares the pass, nor on where in the tree
// its ancestors are stored (a tree's node gets the bits that plain decoding gives it).
#pragma once
#include "abi.h"
#include "pool.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kBlockRows = 48;
constexpr int kMaxRows = 256;  // of one block of queries; ../ops.py refuses larger groups of heads
#if SLIP_ISA == 2
constexpr int kScoreRows = 6, kValueRows = 8;
#else
constexpr int kScoreRows = 4, kValueRows = 3;
#endif

struct TokenView {
    const int64_t* slots;  // of its request's keys, by index
    const int64_t* tail;   // of its visible keys from rank `tail_start`
    uint64_t bits;
    int32_t index;
    int32_t tail_start;
    int32_t regular;  // below this rank, rank and index are the same
    int32_t count;    // visible keys, whatever the window

    int64_t slot(int rank) const { return rank < tail_start ? slots[rank] : tail[rank - tail_start]; }
    int first_rank(int window) const {
        const int first = window > 0 ? index - window + 1 : 0;
        if (first <= regular) return first > 0 ? first : 0;
        int rank = tail_start;
        for (int key = tail_start; key < first; ++key) rank += static_cast<int>((bits >> (index - key)) & 1u);
        return rank;
    }
};

struct QueryBlock {
    int32_t first;
    int32_t tokens;
};

// What a batch means for attention, worked out once for all layers.
struct Plan {
    TokenView* tokens;
    QueryBlock* blocks;
    int num_blocks;
    int max_rows;
    int padded_keys;
};

struct PlanRoom {
    int64_t keys, tokens, blocks;
};

SLIP_INLINE int block_tokens(int group) { return kBlockRows / group > 0 ? kBlockRows / group : 1; }

static PlanRoom plan_room(const Batch& batch, int group) {
    PlanRoom room{0, batch.tokens, 0};
    for (int r = 0; r < batch.requests; ++r) {
        const int tokens = batch.query_starts[r + 1] - batch.query_starts[r];
        room.blocks += (tokens + block_tokens(group) - 1) / block_tokens(group);
        room.keys += batch.kv_lens[r];
    }
    return room;
}

static TokenView view_token(const Batch& batch, int token, const int64_t* slots, int64_t* tail) {
    TokenView view{slots, tail, static_cast<uint64_t>(batch.ancestors[token]), static_cast<int32_t>(batch.kv_index[token]), 0, 0, 0};
    view.tail_start = view.index > 63 ? view.index - 63 : 0;
    view.regular = view.count = view.tail_start;
    for (int key = view.tail_start; key <= view.index; ++key) {
        if (!((view.bits >> (view.index - key)) & 1u)) continue;
        if (view.count == key) view.regular = key + 1;
        tail[view.count++ - view.tail_start] = slots[key];
    }
    return view;
}

static Plan make_plan(const Batch& batch, int group, int64_t* slots, int64_t* tails, TokenView* views, QueryBlock* blocks) {
    Plan plan{views, blocks, 0, 0, 16};
    for (int r = 0; r < batch.requests; ++r) {
        const int32_t* pages = batch.page_table + r * batch.page_table_stride;
        for (int key = 0; key < batch.kv_lens[r]; ++key)
            slots[key] = static_cast<int64_t>(pages[key / batch.page_size]) * batch.page_size + key % batch.page_size;
        const int begin = batch.query_starts[r], end = batch.query_starts[r + 1];
        for (int t = begin; t < end; ++t) {
            views[t] = view_token(batch, t, slots, tails + 64 * static_cast<int64_t>(t));
            const int padded = (views[t].count + 15) / 16 * 16;
            if (padded > plan.padded_keys) plan.padded_keys = padded;
        }
        for (int t = begin; t < end; t += block_tokens(group)) {
            const int tokens = end - t < block_tokens(group) ? end - t : block_tokens(group);
            plan.blocks[plan.num_blocks++] = {t, tokens};
            if (tokens * group > plan.max_rows) plan.max_rows = tokens * group;
        }
        slots += batch.kv_lens[r];
    }
    return plan;
}

struct AttentionArgs {
    Plan plan;
    Kv kv;
    const float* q;  // already multiplied by the softmax scale
    float* out;
    int64_t q_stride, out_stride;
    int heads, kv_heads, head_dim, window;
    float* scores;  // rows of padded_keys floats
    float* inverse;
};

// One kv head's rows of one block of queries; row = token * group + head within the group. T: float, Brain or Half.
template <class T>
struct Unit {
    const AttentionArgs& args;
    QueryBlock block;
    int kv_head;
    float* scores;
    float* inverse;

    int group() const { return args.heads / args.kv_heads; }
    int rows() const { return block.tokens * group(); }
    const TokenView& view(int token) const { return args.plan.tokens[block.first + token]; }
    int first_rank() const {
        int first = view(0).first_rank(args.window);
        for (int t = 1; t < block.tokens; ++t) {
            const int rank = view(t).first_rank(args.window);
            first = rank < first ? rank : first;
        }
        return first & ~15;
    }
    int shared_ranks() const {  // below this rank every row sees the same keys
        int shared = view(0).regular;
        for (int t = 1; t < block.tokens; ++t) shared = view(t).regular < shared ? view(t).regular : shared;
        return shared;
    }
    int last_rank() const {
        int last = 0;
        for (int t = 0; t < block.tokens; ++t) last = view(t).count > last ? view(t).count : last;
        return last;
    }
    float* row_scores(int row) const { return scores + static_cast<int64_t>(row) * args.plan.padded_keys; }
    const float* row_query(int row) const {
        const int token = block.first + row / group(), head = kv_head * group() + row % group();
        return args.q + token * args.q_stride + static_cast<int64_t>(head) * args.head_dim;
    }
    const T* values(int64_t slot) const { return at(args.kv.values, slot); }
    const T* keys(int64_t slot) const { return at(args.kv.keys, slot); }
    const T* at(const void* start, int64_t slot) const {
        return static_cast<const T*>(start) + slot * args.kv.slot_stride + kv_head * args.head_dim;
    }
};

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
constexpr int kSpan = sizeof(T) == 4 ? 16 : 32;
SLIP_INLINE void transpose16(const float* const* rows, int at, float* out) {
    __m512 a[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i] + at);
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
SLIP_INLINE void transpose16(const Half* const* rows, int at, float* out) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i apart = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(even)),
                                             _mm512_cvtepi32_epi16(_mm512_add_epi32(even, _mm512_set1_epi32(1))), 1);
    __m512 a[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
    transpose_words(a);
    for (int i = 0; i < 16; ++i) {
        const __m512i pairs = _mm512_permutexvar_epi16(apart, _mm512_castps_si512(a[i]));
        vstore(out + 32 * i, _mm512_cvtph_ps(_mm512_castsi512_si256(pairs)));
        vstore(out + 32 * i + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(pairs, 1)));
    }
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

template <class T>
static void transpose_keys(const T* const* rows, int head_dim, float* out) {
    int at = 0;
    for (; at + kSpan<T> <= head_dim; at += kSpan<T>) transpose16(rows, at, out + 16 * at);
    for (; at < head_dim; at += 16) {
        const int left = head_dim - at < 16 ? head_dim - at : 16;
        for (int lane = 0; lane < 16; ++lane) {
            alignas(64) float t[16];
            vstore(t, vload_any_n(rows[lane] + at, left));
            for (int i = 0; i < left; ++i) out[16 * (at + i) + lane] = t[i];
        }
    }
}

template <int R, class T>
static void score_rows(const Unit<T>& unit, const int* rows, int num_rows, const float* keys, int base) {
    int done = 0;
    for (; done + R <= num_rows; done += R) {
        const float* q[R];
        V sum[R];
        for (int r = 0; r < R; ++r) {
            q[r] = unit.row_query(rows[done + r]);
            sum[r] = vzero();
        }
        for (int i = 0; i < unit.args.head_dim; ++i) {
            const V key = vload(keys + 16 * i);
            for (int r = 0; r < R; ++r) sum[r] = vfma(vset(q[r][i]), key, sum[r]);
        }
        for (int r = 0; r < R; ++r) vstore(unit.row_scores(rows[done + r]) + base, sum[r]);
    }
    if constexpr (R > 1) {
        if (done < num_rows) score_rows<R - 1>(unit, rows + done, num_rows - done, keys, base);
    }
}

constexpr int kKeysAhead = 32, kValuesAhead = 32;

// One head's keys are strided by the other heads', which the hardware does not foresee.
template <class T>
SLIP_INLINE void fetch(const T* p, int count) {
    for (int i = 0; i < count; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(p + i);
}

// Scores of ranks 16 begin .. 16 end.
template <class T>
static void score_tiles(const Unit<T>& unit, int begin, int end, float* transposed) {
    const T* pointers[16];
    int rows[kMaxRows];
    const int group = unit.group();
    for (int tile = begin; tile < end; ++tile) {
        const int base = 16 * tile;
        int num_rows = 0;
        const TokenView* longest = nullptr;
        for (int t = 0; t < unit.block.tokens; ++t) {
            const TokenView& view = unit.view(t);
            if (view.count <= base) continue;
            if (view.regular >= (view.count < base + 16 ? view.count : base + 16)) {
                for (int h = 0; h < group; ++h) rows[num_rows++] = t * group + h;
                if (!longest || view.count > longest->count) longest = &view;
                continue;
            }
            int own[kMaxRows];
            for (int lane = 0; lane < 16; ++lane) pointers[lane] = unit.keys(view.slot(base + lane < view.count ? base + lane : view.count - 1));
            for (int h = 0; h < group; ++h) own[h] = t * group + h;
            transpose_keys(pointers, unit.args.head_dim, transposed);
            score_rows<kScoreRows>(unit, own, group, transposed, base);
        }
        if (!longest) continue;
        for (int lane = 0; lane < 16; ++lane)
            if (base + kKeysAhead + lane < longest->tail_start) fetch(unit.keys(longest->slots[base + kKeysAhead + lane]), unit.args.head_dim);
        for (int lane = 0; lane < 16; ++lane) pointers[lane] = unit.keys(longest->slot(base + lane < longest->count ? base + lane : longest->count - 1));
        transpose_keys(pointers, unit.args.head_dim, transposed);
        score_rows<kScoreRows>(unit, rows, num_rows, transposed, base);
    }
}

// Turn a row's scores into weights, zero from the block's first rank to the row's own; keep one over their sum.
template <class T>
static void softmax_row(const Unit<T>& unit, int row) {
    const TokenView& view = unit.view(row / unit.group());
    const int first = view.first_rank(unit.args.window), from = unit.first_rank(), count = view.count;
    float* scores = unit.row_scores(row);
    for (int rank = from; rank < first; ++rank) scores[rank] = -__builtin_inff();
    for (int rank = count; rank < (count + 15) / 16 * 16; ++rank) scores[rank] = -__builtin_inff();
    V largest = vset(-__builtin_inff());
    for (int rank = from; rank < count; rank += 16) largest = vmax(largest, vload(scores + rank));
    const V top = vset(vmax_lane(largest));
    V sum = vzero();
    for (int rank = from; rank < count; rank += 16) {
        V weight = vexp(vsub(vload(scores + rank), top));
        if (rank < first || rank + 16 > count) {
            vstore(scores + rank, weight);
            for (int lane = 0; lane < 16; ++lane)
                if (rank + lane < first || rank + lane >= count) scores[rank + lane] = 0.0f;
            weight = vload(scores + rank);
        }
        vstore(scores + rank, weight);
        sum = vadd(sum, weight);
    }
    unit.inverse[row] = count > first ? 1.0f / vsum(sum) : 0.0f;
}

// Ranks begin .. end of the keys all rows share; sums wait in the output between calls for one row.
struct Ranks {
    int begin, end;
    bool first, last;
};

template <int R, int C, class T>
static void value_rows(const Unit<T>& unit, int row, int at, int width, const Ranks& ranks) {
    V sum[R][C];
    const float* weights[R];
    float* out[R];
    const auto load = [&](const auto* p, int c) { return width >= 16 ? vload_any(p + 16 * c) : vload_any_n(p, width); };
    for (int r = 0; r < R; ++r) {
        const int token = (row + r) / unit.group(), head = unit.kv_head * unit.group() + (row + r) % unit.group();
        weights[r] = unit.row_scores(row + r);
        out[r] = unit.args.out + (unit.block.first + token) * unit.args.out_stride + static_cast<int64_t>(head) * unit.args.head_dim + at;
        for (int c = 0; c < C; ++c) sum[r][c] = ranks.first ? vzero() : load(out[r], c);
    }
    const int64_t* slots = unit.view(0).slots;
    for (int rank = ranks.begin; rank < ranks.end; ++rank) {
        const T* p = unit.values(slots[rank]) + at;
        if (rank + kValuesAhead < unit.view(0).regular) fetch(unit.values(slots[rank + kValuesAhead]) + at, 16 * C);
        V value[C];
        for (int c = 0; c < C; ++c) value[c] = load(p, c);
        for (int r = 0; r < R; ++r) {
            const V weight = vset(weights[r][rank]);
            for (int c = 0; c < C; ++c) sum[r][c] = vfma(weight, value[c], sum[r][c]);
        }
    }
    for (int r = 0; r < R; ++r) {
        if (ranks.last) {
            const TokenView& view = unit.view((row + r) / unit.group());
            for (int rank = ranks.end; rank < view.count; ++rank) {
                const T* p = unit.values(view.slot(rank)) + at;
                for (int c = 0; c < C; ++c) sum[r][c] = vfma(vset(weights[r][rank]), load(p, c), sum[r][c]);
            }
            for (int c = 0; c < C; ++c) sum[r][c] = vmul(sum[r][c], vset(unit.inverse[row + r]));
        }
        for (int c = 0; c < C; ++c) {
            if (width >= 16) vstore(out[r] + 16 * c, sum[r][c]);
            else vstore_n(out[r], sum[r][c], width);
        }
    }
}

template <int R, int C, class T>
static void value_columns(const Unit<T>& unit, int row, int at, int width, const Ranks& ranks) {
    const int rows = unit.rows();
    for (; row + R <= rows; row += R) value_rows<R, C>(unit, row, at, width, ranks);
    if constexpr (R > 1) {
        if (row < rows) value_columns<R - 1, C>(unit, row, at, width, ranks);
    }
}

// Values 32 chunk .. 32 chunk + 32 of every row's output.
template <class T>
static void value_chunk(const Unit<T>& unit, int chunk, const Ranks& ranks) {
    int at = 32 * chunk;
    const int end = at + 32 < unit.args.head_dim ? at + 32 : unit.args.head_dim;
    if (end - at == 32) return value_columns<kValueRows, 2>(unit, 0, at, 32, ranks);
    for (; at < end; at += 16) value_columns<kValueRows, 1>(unit, 0, at, end - at < 16 ? end - at : 16, ranks);
}

// Columns begin .. end of one block's outputs, counted in chunks over its kv heads; keys in tiles, so that memory is
// read from front to back whatever the number of heads.
template <class UnitOf>
static void value_range(const UnitOf& unit_of, int chunks, int begin, int end) {
    constexpr int kTile = 32;
    const auto some = unit_of(begin / chunks);
    const int shared = some.shared_ranks(), from = some.first_rank() < shared ? some.first_rank() : shared;
    for (int rank = from; rank == from || rank < shared; rank += kTile) {
        const int stop = rank + kTile < shared ? rank + kTile : shared;
        const Ranks ranks{rank, stop, rank == from, stop == shared};
        for (int column = begin; column < end; ++column) value_chunk(unit_of(column / chunks), column % chunks, ranks);
    }
}

struct AttentionRoom {
    bool together;  // the team shares each block of queries; otherwise a member takes a block from start to end
    int64_t scores, inverse, transposed;  // floats
};

static AttentionRoom attention_room(int num_blocks, int max_rows, int padded_keys, int kv_heads, int head_dim, int team) {
    const bool together = num_blocks < 2 * team;
    const int64_t copies = static_cast<int64_t>(together ? num_blocks : team) * kv_heads;
    return {together, copies * max_rows * padded_keys, copies * max_rows, static_cast<int64_t>(team) * 16 * head_dim};
}

template <class T>
SLIP_INLINE Unit<T> make_unit(const AttentionArgs& args, int index, int copy) {
    return {args, args.plan.blocks[index / args.kv_heads], index % args.kv_heads,
            args.scores + static_cast<int64_t>(copy) * args.plan.max_rows * args.plan.padded_keys,
            args.inverse + static_cast<int64_t>(copy) * args.plan.max_rows};
}

// One block of queries by one member. With few rows memory decides, and is read from front to back, all heads of a tile
// together; with many rows arithmetic does, and a head's scores stay in the second cache.
template <class T>
static void attend_block(const AttentionArgs& args, int block, int copy, float* transposed) {
    const int heads = args.kv_heads, chunks = (args.head_dim + 31) / 32;
    const auto unit_of = [&](int head) { return make_unit<T>(args, block * heads + head, copy * heads + head); };
    const Unit<T> some = unit_of(0);
    const int first = some.first_rank() / 16, last = (some.last_rank() + 15) / 16, rows = some.rows();
    const int together = 2 * rows > kBlockRows ? 1 : heads;
    for (int head = 0; head < heads; head += together) {
        const int stop = head + together;
        for (int tile = first; tile < last; ++tile)
            for (int h = head; h < stop; ++h) score_tiles(unit_of(h), tile, tile + 1, transposed);
        for (int h = head; h < stop; ++h)
            for (int row = 0; row < rows; ++row) softmax_row(unit_of(h), row);
        value_range(unit_of, chunks, chunks * head, chunks * stop);
    }
}

// Every member calls this. Uses at most 3 phases.
template <class T>
static void attend_over(const AttentionArgs& args, bool together, float* transposed_room, Team& team) {
    const int units = args.plan.num_blocks * args.kv_heads, chunks = (args.head_dim + 31) / 32;
    float* transposed = transposed_room + static_cast<int64_t>(team.id) * 16 * args.head_dim;
    if (!together) {
        team.share(args.plan.num_blocks, 1, [&](int block, int) { attend_block<T>(args, block, team.id, transposed); });
        return;
    }
    // Members share each block's keys, all heads of a tile together, and then its columns of values.
    constexpr int kTiles = 4;
    const int groups = (args.plan.padded_keys / 16 + kTiles - 1) / kTiles, heads = args.kv_heads;
    team.share(args.plan.num_blocks * groups, 1, [&](int index, int) {
        const int block = index / groups;
        for (int tile = index % groups * kTiles; tile < (index % groups + 1) * kTiles; ++tile)
            for (int head = 0; head < heads; ++head) {
                const Unit<T> unit = make_unit<T>(args, block * heads + head, block * heads + head);
                if (tile >= unit.first_rank() / 16 && tile < (unit.last_rank() + 15) / 16) score_tiles(unit, tile, tile + 1, transposed);
            }
    });
    team.share(units * args.plan.max_rows, 4, [&](int begin, int end) {
        for (int index = begin; index < end; ++index) {
            const Unit<T> unit = make_unit<T>(args, index / args.plan.max_rows, index / args.plan.max_rows);
            if (index % args.plan.max_rows < unit.rows()) softmax_row(unit, index % args.plan.max_rows);
        }
    });
    const int columns = heads * chunks, spans = columns < team.size ? columns : team.size;
    team.share(args.plan.num_blocks * spans, 1, [&](int index, int) {
        const int block = index / spans, span = index % spans;
        value_range([&](int head) { return make_unit<T>(args, block * heads + head, block * heads + head); }, chunks,
                    columns * span / spans, columns * (span + 1) / spans);
    });
}

static void attend(const AttentionArgs& args, bool together, float* transposed_room, Team& team) {
    if (args.kv.format == BF16) attend_over<Brain>(args, together, transposed_room, team);
    else if (args.kv.format == F16) attend_over<Half>(args, together, transposed_room, team);
    else attend_over<float>(args, together, transposed_room, team);
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
