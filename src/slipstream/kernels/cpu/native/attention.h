// Paged attention over trees of query tokens.
//
// The keys a token sees are counted in order: its r-th visible key has rank r. Scores are dot products over the head's
// values from first to last; the softmax's sum runs over 16 lanes by rank and one tree; values are added by rank. So a
// token's bits depend only on the keys it sees: not on pages, on what else shares the pass, nor on where in the tree
// its ancestors are stored (a tree's node gets the bits that plain decoding gives it).
#pragma once
#include "activations.h"
#include "attention_plan.h"
#include "pool.h"
#include "table.h"
#include "transpose.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kMaxRows = kMaxGroup;  // of one block of queries
// What fits the registers: rows and tiles of 16 keys scored together, rows and columns of 16 values summed together.
#if SLIP_ISA == 2
constexpr int kScoreRows = 8, kScoreTiles = 2, kValueRows = 6, kValueColumns = 4;
#else
constexpr int kScoreRows = 4, kScoreTiles = 1, kValueRows = 3, kValueColumns = 2;
#endif

struct AttentionArgs {
    Plan plan;
    Kv kv;
    const float* q;  // already multiplied by the softmax scale
    float* out;
    int64_t q_stride, out_stride;
    int heads, kv_heads, head_dim, window;
    float* scores;  // rows of padded_keys floats
    float* inverse;
    const Linear* reader;  // a weight whose input the output is, quantized as soon as a block of it is there; or null
    Activations codes;
    const float* sinks = nullptr;  // by query head
    int chunk = 0;
};

// One kv head's rows of one block of queries; row = token * group + head within the group. T: float, Brain, Half or
// Eight. The powers of two that codes of Eight are multiplied by go to scores and to weights instead: the bits are those
// of attention over the numbers that codes stand for.
template <class T>
struct Unit {
    const AttentionArgs& args;
    QueryBlock block;
    int kv_head;
    float* scores;
    float* inverse;

    int group() const { return args.plan.group; }
    int rows() const { return block.tokens * group(); }
    const TokenView& view(int token) const { return args.plan.tokens[block.first + token]; }
    int shared(int begin, int end) const {  // below this rank, tokens begin .. end see the same keys
        int rank = view(begin).regular;
        for (int t = begin + 1; t < end; ++t) rank = view(t).regular < rank ? view(t).regular : rank;
        return rank;
    }
    int first_rank() const {
        if (args.window <= 0 && args.chunk <= 0) return 0;
        int first = view(0).first_rank(args.window, args.chunk);
        for (int t = 1; t < block.tokens; ++t) {
            const int rank = view(t).first_rank(args.window, args.chunk);
            first = rank < first ? rank : first;
        }
        return first & ~15;
    }
    float* row_scores(int row) const { return scores + static_cast<int64_t>(row) * args.plan.padded_keys; }
    const float* query(int token, int head) const {  // the block's, and the group's
        return args.q + (block.first + token) * args.q_stride + (static_cast<int64_t>(kv_head) * group() + head) * args.head_dim;
    }
    float* output(int token, int head) const {
        return args.out + (block.first + token) * args.out_stride + (static_cast<int64_t>(kv_head) * group() + head) * args.head_dim;
    }
    float scale(const uint8_t* scales, int64_t slot) const {
        return power_of_two(scales[slot * args.kv_heads + kv_head] - 127 + kEightShift);
    }
    const T* values(int64_t slot) const { return at(args.kv.values, slot); }
    const T* keys(int64_t slot) const { return at(args.kv.keys, slot); }
    const T* at(const void* start, int64_t slot) const {
        return static_cast<const T*>(start) + slot * args.kv.slot_stride + kv_head * args.head_dim;
    }
};

// A row to score: what is multiplied, and where its scores are.
struct ScoredRow {
    const float* query;
    float* scores;
};

// Scores of C tiles of 16 keys, `16 head_dim` numbers each. A row's value is broadcast once for all of them.
template <int R, int C, class K>
static void score_rows(const ScoredRow* rows, int num_rows, const K* keys, int head_dim, int base) {
    int done = 0;
    for (; done + R <= num_rows; done += R) {
        const float* q[R];
        V sum[R * C];
        unrolled<R>(SLIP_UNROLLED { q[i] = rows[done + i].query; });
        unrolled<R * C>(SLIP_UNROLLED { sum[i] = vzero(); });
        for (int at = 0; at < head_dim; ++at) {
            V key[C];
            unrolled<C>(SLIP_UNROLLED { key[i] = vload_any(keys + 16 * (i * head_dim + at)); });
            unrolled<R>(SLIP_UNROLLED {
                constexpr int r = i;
                const V value = vset(q[r][at]);
                unrolled<C>(SLIP_UNROLLED { sum[r * C + i] = vfma(value, key[i], sum[r * C + i]); });
            });
        }
        unrolled<R * C>(SLIP_UNROLLED { vstore(rows[done + i / C].scores + base + 16 * (i % C), sum[i]); });
    }
    if constexpr (R > 1) {
        if (done < num_rows) score_rows<(R + 1) / 2, C>(rows + done, num_rows - done, keys, head_dim, base);
    }
}

constexpr int kKeysAhead = 32, kValuesAhead = 32;

// One head's keys are strided by the other heads', which the hardware does not foresee.
template <class T>
SLIP_INLINE void fetch(const T* p, int count) {
    for (int i = 0; i < count; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(p + i);
}

// Rows of keys or values to ask for while others are computed with, some lines at a time. They go to the second cache:
// memory would otherwise stand still during attention's arithmetic, and arithmetic while the first keys come.
class Ahead {
  public:
    template <class T>
    void rows(const void* start, const TokenView& view, int64_t slot_stride, int begin, int end) {
        start_ = static_cast<const char*>(start);
        slots_ = view.slots;
        stride_ = slot_stride * static_cast<int64_t>(sizeof(T));
        offset_ = begin_ = begin * static_cast<int64_t>(sizeof(T)) / 64 * 64;
        end_ = end * static_cast<int64_t>(sizeof(T));
        row_ = 0;
        num_rows_ = view.tail_start;
    }
    void some(int lines) {
        for (; lines > 0 && row_ < num_rows_; --lines) {
            __builtin_prefetch(start_ + slots_[row_] * stride_ + offset_, 0, 2);
            offset_ += 64;
            if (offset_ >= end_) {
                offset_ = begin_;
                ++row_;
            }
        }
    }

  private:
    const char* start_ = nullptr;
    const int64_t* slots_ = nullptr;
    int64_t stride_ = 0, begin_ = 0, end_ = 0, offset_ = 0;
    int row_ = 0, num_rows_ = 0;
};

// Lines that memory brings while 16 keys are scored, and while 32 values are added up, for so many rows: one line takes
// about as long as 16 cycles of arithmetic.
SLIP_INLINE int lines_per_scores(int rows) { return 19 + 4 * rows; }
SLIP_INLINE int lines_per_values(int rows) { return 8 + 4 * rows; }

// Scores of C tiles of keys for some rows. With few rows, half-precision keys are widened as they are multiplied: that is
// less work than storing them wide; with many rows it would be done again for every eight of them.
template <int C, class T>
static void score_keys(const ScoredRow* rows, int num_rows, const T* const* keys, int head_dim, float* transposed, int base) {
#if SLIP_ISA == 2
    if constexpr (std::is_same<T, Half>::value && C == 1) {
        if (num_rows <= 2 * kScoreRows) {
            Half* halves = reinterpret_cast<Half*>(transposed);
            transpose_keys(keys, head_dim, halves);
            return score_rows<kScoreRows, 1>(rows, num_rows, halves, head_dim, base);
        }
    }
#endif
    for (int tile = 0; tile < C; ++tile) transpose_keys(keys + 16 * tile, head_dim, transposed + 16 * tile * head_dim);
    score_rows<kScoreRows, C>(rows, num_rows, transposed, head_dim, base);
}

template <class T>
SLIP_INLINE void scale_scores(const Unit<T>& unit, const ScoredRow* rows, int num_rows, const TokenView& view, int base) {
    if constexpr (std::is_same<T, Eight>::value) {
        float scales[16];
        for (int lane = 0; lane < 16; ++lane) scales[lane] = unit.scale(unit.args.kv.key_scales, view.slot_up_to_last(base + lane));
        const V by = vload(scales);
        for (int row = 0; row < num_rows; ++row) vstore(rows[row].scores + base, vmul(vload(rows[row].scores + base), by));
    }
}

// Scores of C tiles of keys, from rank `base` on, for rows that see the same keys there, as `view` does.
template <int C, class T>
static void score_view(const Unit<T>& unit, const ScoredRow* rows, int num_rows, const TokenView& view, int base, float* transposed) {
    const T* pointers[16 * C];
    for (int lane = 0; lane < 16 * C; ++lane) pointers[lane] = unit.keys(view.slot_up_to_last(base + lane));
    score_keys<C>(rows, num_rows, pointers, unit.args.head_dim, transposed, base);
    for (int tile = 0; tile < C; ++tile) scale_scores(unit, rows, num_rows, view, base + 16 * tile);
}

// Scores of C tiles of keys for every row of a unit.
template <int C, class T>
static void score_tiles(const Unit<T>& unit, int tile, float* transposed) {
    ScoredRow rows[kMaxRows];
    const int group = unit.group(), base = 16 * tile, end = base + 16 * C;
    int num_rows = 0;
    const TokenView* longest = nullptr;
    for (int t = 0; t < unit.block.tokens; ++t) {
        const TokenView& view = unit.view(t);
        if (view.count <= base) continue;
        ScoredRow* own = rows + num_rows;
        for (int h = 0; h < group; ++h) own[h] = {unit.query(t, h), unit.row_scores(t * group + h)};
        if (view.regular < (view.count < end ? view.count : end)) {  // it sees other keys than the rest
            score_view<C>(unit, own, group, view, base, transposed);
            continue;
        }
        num_rows += group;
        if (!longest || view.count > longest->count) longest = &view;
    }
    if (!longest) return;
    for (int rank = base + kKeysAhead; rank < end + kKeysAhead && rank < longest->tail_start; ++rank)
        fetch(unit.keys(longest->slots[rank]), unit.args.head_dim);
    score_view<C>(unit, rows, num_rows, *longest, base, transposed);
}

// Turn a row's scores into weights, zero from the block's first rank to the row's own; keep one over their sum.
template <class T>
static void softmax_row(const Unit<T>& unit, int row) {
    const TokenView& view = unit.view(row / unit.group());
    const int first = view.first_rank(unit.args.window, unit.args.chunk), from = unit.first_rank(), count = view.count;
    float* scores = unit.row_scores(row);
    for (int rank = from; rank < first; ++rank) scores[rank] = -__builtin_inff();
    for (int rank = count; rank < (count + 15) / 16 * 16; ++rank) scores[rank] = -__builtin_inff();
    V largest = vset(-__builtin_inff());
    for (int rank = from; rank < count; rank += 16) largest = vmax(largest, vload(scores + rank));
    const float* sinks = unit.args.sinks;
    const float sink = sinks ? sinks[unit.kv_head * unit.group() + row % unit.group()] : -__builtin_inff();
    const float most = vmax_lane(largest);
    const V top = vset(most > sink ? most : sink);
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
    float total = vsum(sum);
    if (sinks) {
        float lanes[16];
        vstore(lanes, vexp(vsub(vset(sink), top)));
        total += lanes[0];
    }
    unit.inverse[row] = count > first ? 1.0f / total : 0.0f;
    if constexpr (std::is_same<T, Eight>::value)
        for (int rank = first; rank < count; ++rank) scores[rank] *= unit.scale(unit.args.kv.value_scales, view.slot(rank));
}

// Ranks begin .. end of the keys all rows share; sums wait in the output between calls for one row.
struct Ranks {
    int begin, end;
    bool first, last;
};

// Rows whose values are added up together: their weights by rank, and where their sums wait.
template <int R>
struct SummedRows {
    const float* weights[R];
    float* out[R];
};

// C times 16 columns, or less than 16.
template <class T>
SLIP_INLINE V load_column(const T* p, int c, int width) {
    return width >= 16 ? vload_any(p + 16 * c) : vload_any_n(p, width);
}
SLIP_INLINE void store_column(float* p, int c, int width, V sum) {
    if (width >= 16) vstore(p + 16 * c, sum);
    else vstore_n(p, sum, width);
}

// Add ranks of keys that all rows see. A function of its own, so that nothing else wants the sums' registers.
template <int R, int C, class T>
__attribute__((noinline)) static void add_shared(const SummedRows<R>& rows, const T* values, const TokenView& view, int64_t stride, int width,
                                                 const Ranks& ranks) {
    V sum[R * C];
    if (ranks.first) unrolled<R * C>(SLIP_UNROLLED { sum[i] = vzero(); });
    else unrolled<R * C>(SLIP_UNROLLED { sum[i] = load_column(rows.out[i / C], i % C, width); });
    const int64_t* slots = view.slots;
    const int end = ranks.end, regular = view.regular;
    for (int rank = ranks.begin; rank < end; ++rank) {
        const T* p = values + slots[rank] * stride;
        if (rank + kValuesAhead < regular) fetch(values + slots[rank + kValuesAhead] * stride, 16 * C);
        V value[C];
        unrolled<C>(SLIP_UNROLLED { value[i] = load_column(p, i, width); });
        unrolled<R * C>(SLIP_UNROLLED { sum[i] = vfma(vset(rows.weights[i / C][rank]), value[i % C], sum[i]); });
    }
    unrolled<R * C>(SLIP_UNROLLED { store_column(rows.out[i / C], i % C, width, sum[i]); });
}

// Add what a row sees beyond those, and divide by the sum of its weights.
template <int C, class T>
SLIP_INLINE void finish_row(const Unit<T>& unit, int row, float* out, int at, int width, int rank) {
    const TokenView& view = unit.view(row / unit.group());
    const float* weights = unit.row_scores(row);
    const V inverse = vset(unit.inverse[row]);
    V sum[C];
    unrolled<C>(SLIP_UNROLLED { sum[i] = load_column(out, i, width); });
    for (; rank < view.count; ++rank) {
        const T* p = unit.values(view.slot(rank)) + at;
        unrolled<C>(SLIP_UNROLLED { sum[i] = vfma(vset(weights[rank]), load_column(p, i, width), sum[i]); });
    }
    unrolled<C>(SLIP_UNROLLED { store_column(out, i, width, vmul(sum[i], inverse)); });
}

template <int R, int C, class T>
static void value_rows(const Unit<T>& unit, int row, int at, int width, Ranks ranks) {
    SummedRows<R> rows;
    const int begin = row / unit.group();
    int token = begin;
    for (int r = 0, head = row % unit.group(); r < R; ++r) {
        rows.weights[r] = unit.row_scores(row + r);
        rows.out[r] = unit.output(token, head) + at;
        if (++head == unit.group() && r + 1 < R) {
            head = 0;
            ++token;
        }
    }
    const int first = ranks.last ? unit.first_rank() : 0;
    if (ranks.last) {  // these rows may see more keys alike than the whole block, and a window may begin within a tree
        ranks.begin = first > ranks.begin ? first : ranks.begin;
        ranks.end = unit.shared(begin, token + 1);
    }
    add_shared<R, C>(rows, unit.values(0) + at, unit.view(begin), unit.args.kv.slot_stride, width, ranks);
    if (!ranks.last) return;
    const int rest = first > ranks.end ? first : ranks.end;
    for (int r = 0; r < R; ++r) finish_row<C>(unit, row + r, rows.out[r], at, width, rest);
}

template <int R, int C, class T>
static void value_columns(const Unit<T>& unit, int row, int at, int width, const Ranks& ranks) {
    const int rows = unit.rows();
    for (; row + R <= rows; row += R) value_rows<R, C>(unit, row, at, width, ranks);
    if constexpr (R > 1) {
        if (row < rows) value_columns<R - 1, C>(unit, row, at, width, ranks);
    }
}

// Values 32 chunk .. 32 end of every row's output.
template <class T>
static void value_chunks(const Unit<T>& unit, int chunk, int end, const Ranks& ranks) {
    const int last = 32 * end < unit.args.head_dim ? 32 * end : unit.args.head_dim;
    int at = 32 * chunk;
    if constexpr (kValueColumns == 4)
        for (; at + 64 <= last && unit.rows() >= kValueRows; at += 64) value_columns<kValueRows, 4>(unit, 0, at, 64, ranks);
    for (; at + 32 <= last; at += 32) value_columns<kValueRows, 2>(unit, 0, at, 32, ranks);
    for (; at < last; at += 16) value_columns<kValueRows, 1>(unit, 0, at, last - at < 16 ? last - at : 16, ranks);
}

// The same values as the reader's input, while they are in the first cache of the member that computed them.
template <class T>
static void quantize_chunk(const Unit<T>& unit, int chunk) {
    const int group = unit.group(), per_head = unit.args.head_dim / 32;
    for (int t = 0; t < unit.block.tokens; ++t)
        for (int h = 0; h < group; ++h)
            quantize_block(*unit.args.reader, unit.args.codes, unit.block.first + t, (unit.kv_head * group + h) * per_head + chunk,
                           unit.output(t, h) + 32 * chunk);
}

// Columns begin .. end of one block's outputs, counted in chunks over its kv heads; keys in tiles, so that memory is
// read from front to back whatever the number of heads.
template <class UnitOf>
static void value_range(const UnitOf& unit_of, int chunks, int begin, int end, Ahead& ahead) {
    constexpr int kTile = 64;
    const auto some = unit_of(begin / chunks);
    const int shared = some.block.shared, from = some.first_rank() < shared ? some.first_rank() : shared;
    for (int rank = from; rank == from || rank < shared; rank += kTile) {
        const int stop = rank + kTile < shared ? rank + kTile : shared;
        const Ranks ranks{rank, stop, rank == from, stop == shared};
        for (int column = begin; column < end;) {
            const auto unit = unit_of(column / chunks);
            const int chunk = column % chunks, stop = chunk + end - column < chunks ? chunk + end - column : chunks;
            value_chunks(unit, chunk, stop, ranks);
            for (int c = chunk; ranks.last && unit.args.reader && c < stop; ++c) quantize_chunk(unit, c);
            ahead.some((stop - chunk) * lines_per_values(some.rows()));
            column += stop - chunk;
        }
    }
}

struct AttentionSize {
    int64_t scores, inverse, transposed;  // floats
};

// Rows of scores that a member needs for a block: of one key head, or of all of them where there are few rows.
SLIP_INLINE int64_t member_rows(int max_rows, int kv_heads) {
    const int together = kv_heads * (max_rows < kFewRows ? max_rows : kFewRows);
    return max_rows > together ? max_rows : together;
}

static AttentionSize attention_size(const PlanSize& plan, int group, int padded_keys, int kv_heads, int head_dim, int team) {
    const int max_rows = plan.block_tokens * group;
    const int64_t rows = plan.together ? plan.blocks * kv_heads * max_rows : team * member_rows(max_rows, kv_heads);
    return {rows * padded_keys, rows, static_cast<int64_t>(team) * kScoreTiles * 16 * head_dim};
}

// A unit whose scores begin at row `first` of the buffer for them.
template <class T>
SLIP_INLINE Unit<T> make_unit(const AttentionArgs& args, int block, int head, int64_t first) {
    return {args, args.plan.blocks[block], head, args.scores + first * args.plan.padded_keys, args.inverse + first};
}
template <class T>
SLIP_INLINE Unit<T> shared_unit(const AttentionArgs& args, int index) {  // every unit has rows of its own
    return make_unit<T>(args, index / args.kv_heads, index % args.kv_heads, static_cast<int64_t>(index) * args.plan.max_rows);
}

// One block of queries by one member. With few rows memory decides, and is read from front to back, all heads of a tile
// together; with many rows arithmetic does, and a head's scores stay in the second cache.
template <class T>
static void attend_block(const AttentionArgs& args, int block, int next, int member, float* transposed) {
    const int heads = args.kv_heads, chunks = (args.head_dim + 31) / 32;
    const int rows = args.plan.blocks[block].tokens * args.plan.group, together = rows > kFewRows ? 1 : heads;
    const int64_t own = member * member_rows(args.plan.max_rows, heads);
    const auto unit_of = [&](int head) { return make_unit<T>(args, block, head, own + head % together * rows); };
    const Unit<T> some = unit_of(0);
    const int first = some.first_rank() / 16, last = (some.block.last + 15) / 16;
    Ahead ahead;
    ahead.rows<T>(args.kv.values, some.view(0), args.kv.slot_stride, 0, heads * args.head_dim);
    for (int head = 0; head < heads; head += together) {
        const int stop = head + together;
        for (int tile = first; tile < last;) {
            const bool several = together == 1 && tile + kScoreTiles <= last;
            for (int h = head; h < stop; ++h) {
                if (several) score_tiles<kScoreTiles>(unit_of(h), tile, transposed);
                else score_tiles<1>(unit_of(h), tile, transposed);
                ahead.some(lines_per_scores(rows));
            }
            tile += several ? kScoreTiles : 1;
        }
        if (stop == heads && next >= 0)
            ahead.rows<T>(args.kv.keys, args.plan.tokens[args.plan.blocks[next].first], args.kv.slot_stride, 0, heads * args.head_dim);
        for (int h = head; h < stop; ++h)
            for (int row = 0; row < rows; ++row) softmax_row(unit_of(h), row);
        value_range(unit_of, chunks, chunks * head, chunks * stop, ahead);
    }
}

// Every member calls this. Uses at most 3 phases.
template <class T>
static void attend_over(const AttentionArgs& args, bool together, float* transposed_buffers, Team& team) {
    const int units = args.plan.num_blocks * args.kv_heads, chunks = (args.head_dim + 31) / 32;
    float* transposed = transposed_buffers + static_cast<int64_t>(team.id) * kScoreTiles * 16 * args.head_dim;
    if (!together) {
        const int mine = Team::part_begin(args.plan.num_blocks, team.id + 1, team.size);
        team.share(args.plan.num_blocks, 1, [&](int block, int) {
            attend_block<T>(args, block, block + 1 < mine ? block + 1 : -1, team.id, transposed);
        });
        return;
    }
    // Members share each block's keys, all heads of a tile together, and then its columns of values.
    constexpr int kTiles = 4;
    const int groups = (args.plan.padded_keys / 16 + kTiles - 1) / kTiles, heads = args.kv_heads;
    const int columns = heads * chunks, spans = columns < team.size ? columns : team.size;
    Ahead ahead;
    if (team.id < spans)
        ahead.rows<T>(args.kv.values, args.plan.tokens[0], args.kv.slot_stride, 32 * (columns * team.id / spans),
                      32 * (columns * (team.id + 1) / spans));
    team.share(args.plan.num_blocks * groups, 1, [&](int index, int) {
        const int block = index / groups;
        for (int tile = index % groups * kTiles; tile < (index % groups + 1) * kTiles; ++tile)
            for (int head = 0; head < heads; ++head) {
                const Unit<T> unit = shared_unit<T>(args, block * heads + head);
                if (tile < unit.first_rank() / 16 || tile >= (unit.block.last + 15) / 16) continue;
                score_tiles<1>(unit, tile, transposed);
                ahead.some(lines_per_scores(unit.rows()));
            }
    });
    team.share(units * args.plan.max_rows, 4, [&](int begin, int end) {
        for (int index = begin; index < end; ++index) {
            const Unit<T> unit = shared_unit<T>(args, index / args.plan.max_rows);
            if (index % args.plan.max_rows < unit.rows()) softmax_row(unit, index % args.plan.max_rows);
        }
    });
    team.share(args.plan.num_blocks * spans, 1, [&](int index, int) {
        const int block = index / spans, span = index % spans;
        value_range([&](int head) { return shared_unit<T>(args, block * heads + head); }, chunks,
                    columns * span / spans, columns * (span + 1) / spans, ahead);
    });
}

static void attend(const AttentionArgs& args, bool together, float* transposed_buffers, Team& team) {
    if (args.kv.format == BF16) attend_over<Brain>(args, together, transposed_buffers, team);
    else if (args.kv.format == F16) attend_over<Half>(args, together, transposed_buffers, team);
    else if (args.kv.format == E4M3) attend_over<Eight>(args, together, transposed_buffers, team);
    else attend_over<float>(args, together, transposed_buffers, team);
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
