// A stack of decoder blocks as one job: every member of the team walks through all of it, sharing its loops.
#pragma once
#include "attention.h"
#include "panels.h"
#include "pointwise.h"
#include "scratch.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kPhasesPerLayer = 14;  // that one goes through at most, beside captures

// Panels a member takes at a time: fewer where rows make each one longer, so that nobody waits long for the last.
constexpr int kMostPanels = 8;
SLIP_INLINE int piece_size(int panels, int team, int rows) {
    const int piece = panels / (8 * team), most = rows < 16 ? kMostPanels : kMostPanels / 2;
    return piece < 1 ? 1 : piece > most ? most : piece;
}

// All the memory a stack needs, laid out once per call. A pass streams weights through the caches, so what a member alone
// needs is small and used again at once instead of lying there for all rows.
struct Workspace {
    float* own;     // per member: the gates and ups of a piece
    float* normed;  // one copy, or one per member when few rows make repeating cheaper than sharing
    char* codes;
    char* ready;  // codes made by whoever computed the values
    float* qkv;
    float* attended;
    float* gate_up;    // where a piece would not be whole panels
    float* activated;  // where a piece's codes cannot be made at once
    int64_t own_size, normed_size, codes_size;
    AttentionArgs attention;
    bool together;
    float* transposed;
    bool repeat;
};

SLIP_INLINE void copy_row(float* to, const float* from, int n) { std::memcpy(to, from, sizeof(float) * static_cast<size_t>(n)); }

struct Walk {
    const Stack& stack;
    const Batch& batch;
    const Workspace& work;
    float* hidden;
    const float* embedding;
    Team& team;

    int tokens() const { return batch.tokens; }
    int copy() const { return work.repeat ? team.id : 0; }
    float* own() const { return work.own + team.id * work.own_size; }
    float* normed() const { return work.normed + copy() * work.normed_size; }
    char* codes() const { return work.codes + copy() * work.codes_size; }

    // Run body(row) for every row: shared out, or repeated by each member into its own memory. A member that comes late
    // may then read a stream that has moved on; what it makes of that is not used, for the loop after it is done.
    template <class Body>
    void each_row(Body body) {
        if (work.repeat) {
            for (int row = 0; row < tokens(); ++row) body(row);
        } else {
            team.share(tokens(), tokens() / (4 * team.size) + 1, [&](int begin, int end) {
                for (int row = begin; row < end; ++row) body(row);
            });
        }
    }

    Activations prepare(const Linear& w, const float* x, int64_t stride) {
        const Activations a = activations(w, x, stride, tokens(), codes());
        each_row([&](int row) { prepare_rows(w, a, row, row + 1); });
        return a;
    }

    // `next` is the weight that will be read after this one; its first lines are asked for while others finish.
    void multiply(const Linear& w, const Activations& a, const Output& out, const Linear* next, int halves = 1) {
        team.share(
            num_panels(w), piece_size(num_panels(w), team.size, tokens()),
            [&](int begin, int end) { product(w, a, tokens(), begin, end, out); }, [&] { ask_for(next, halves); });
    }

    // `halves` is 2 for gate and up, which a member reads side by side.
    void ask_for(const Linear* w, int halves) {
        if (!w) return;
        const int panels = num_panels(*w) / halves;
        for (int half = 0; half < halves; ++half)
            prefetch_start(*w, half * panels + Team::part_begin(panels, team.id, team.size));
    }

    // The stream, normed, as a weight wants it.
    Activations norm_rows(const Linear& w, const float* norm, float eps) {
        const int width = stack.width;
        const Activations a = activations(w, normed(), width, tokens(), codes());
        each_row([&](int row) {
            rms_norm_row(hidden + static_cast<int64_t>(row) * width, norm, normed() + static_cast<int64_t>(row) * width, width, eps);
            prepare_rows(w, a, row, row + 1);
        });
        return a;
    }

    Activations block_input(const Layer& layer) {
        if (!layer.hidden_norm) return norm_rows(layer.qkv, layer.input_norm, layer.eps);
        const int width = stack.width;
        const Linear& w = layer.qkv;
        team.share(tokens(), 1, [&](int row, int) {
            float* stream = hidden + static_cast<int64_t>(row) * width;
            float* to = work.normed + static_cast<int64_t>(row) * w.k;
            rms_norm_row(embedding + static_cast<int64_t>(row) * width, layer.input_norm, to, width, layer.eps);
            rms_norm_row(stream, layer.hidden_norm, to + width, width, layer.eps);
            if (layer.normed_residual) copy_row(stream, to + width, width);
        });
        return prepare(w, work.normed, w.k);
    }

    void rotate_and_write(const Layer& layer, const Kv& kv) {
        if (kv.format == BF16) rotate_into(layer, kv, static_cast<Brain*>(kv.keys), static_cast<Brain*>(kv.values));
        else if (kv.format == F16) rotate_into(layer, kv, static_cast<Half*>(kv.keys), static_cast<Half*>(kv.values));
        else if (kv.format == E4M3) rotate_into(layer, kv, static_cast<Eight*>(kv.keys), static_cast<Eight*>(kv.values));
        else rotate_into(layer, kv, static_cast<float*>(kv.keys), static_cast<float*>(kv.values));
    }

    template <class T>
    void rotate_into(const Layer& layer, const Kv& kv, T* keys, T* values) {
        const int d = layer.head_dim, heads = layer.heads + 2 * layer.kv_heads;
        const auto one = [&](int item) {
            const int row = item / heads, head = item % heads;
            float* x = work.qkv + static_cast<int64_t>(row) * num_outputs(layer.qkv) + head * d;
            const int64_t at = batch.slots[row] * kv.slot_stride;
            const bool query = head < layer.heads, value = head >= layer.heads + layer.kv_heads;
            const int kv_head = (head - layer.heads) % layer.kv_heads;
            const auto store = [&](T* to, uint8_t* scales) {
                if constexpr (std::is_same<T, Eight>::value)
                    scales[batch.slots[row] * layer.kv_heads + kv_head] = store_scaled(to + at + kv_head * d, x, d);
                else store_span(to + at + kv_head * d, x, d);
            };
            if (value) return store(values, kv.value_scales);
            const float* norm = query ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm_row(x, norm, x, d, layer.qk_eps);
            const int64_t angle = batch.positions[row] * layer.rotary_half;
            rotate_head(x, layer.cos + angle, layer.sin + angle, x, layer.rotary_half, d);
            if (query) scale_span(x, layer.scale, d);
            else store(keys, kv.key_scales);
        };
        team.share(tokens() * heads, heads / team.size + 1, [&](int begin, int end) {
            for (int item = begin; item < end; ++item) one(item);
        });
    }

    void feed_forward(const Layer& layer, const Linear* next) {
        const int n = layer.intermediate;
        const Activations a = norm_rows(layer.gate_up, layer.post_norm, layer.eps);
        const Activations ready = activations(layer.down, work.activated, n, tokens(), work.ready);
        if (n % 16 == 0) {
            gate_and_up(layer, a, ready);
        } else {
            multiply(layer.gate_up, a, {work.gate_up, 2 * static_cast<int64_t>(n), false}, &layer.down);
            team.share(tokens(), 1, [&](int row, int) {
                const float* gate = work.gate_up + 2 * static_cast<int64_t>(n) * row;
                silu_mul_span(gate, gate + n, work.activated + static_cast<int64_t>(n) * row, n);
            });
        }
        const Output sum{hidden, stack.width, true};
        multiply(layer.down, quantizes_at_once(layer.down, n) ? ready : prepare(layer.down, work.activated, n), sum, next);
    }

    // Gates, ups and what they make of each other, piece by piece.
    void gate_and_up(const Layer& layer, const Activations& a, const Activations& ready) {
        const Linear& w = layer.gate_up;
        const int n = layer.intermediate, panels = n / 16, rows = tokens();
        const int step = quantizes_at_once(layer.down, n) ? 2 : 1;  // two panels make a block
        const int piece = piece_size(panels, team.size, rows) / step;
        const auto body = [&](int first, int last) {
            const int begin = step * first, end = step * last, span = 16 * (end - begin);
            float *gates = own(), *ups = gates + static_cast<int64_t>(rows) * span;
            product(w, a, rows, begin, end, {gates, span, false, 16 * begin});
            product(w, a, rows, panels + begin, panels + end, {ups, span, false, n + 16 * begin});
            for (int row = 0; row < rows; ++row, gates += span, ups += span) {
                float* to = step == 2 ? gates : work.activated + static_cast<int64_t>(n) * row + 16 * begin;
                silu_mul_span(gates, ups, to, span);
                for (int block = first; step == 2 && block < last; ++block)
                    quantize_block(layer.down, ready, row, block, to + 32 * (block - first));
            }
        };
        team.share(panels / step, piece < 1 ? 1 : piece, body, [&] { ask_for(&layer.down, 1); });
    }

    // A weight with a scale per block of its input takes it block by block: whoever computes one quantizes it, so that
    // the others read codes instead of floats, and nobody waits in between.
    static bool quantizes_at_once(const Linear& w, int span) { return is_by_block(w.format) && span % 32 == 0; }

    void capture(int applied) {
        for (int i = 0; i < stack.num_captured; ++i) {
            if (stack.captured[i] != applied) continue;
            team.share(tokens(), 16, [&](int begin, int end) {
                for (int row = begin; row < end; ++row)
                copy_row(stack.captured_out[i] + static_cast<int64_t>(row) * stack.width, hidden + static_cast<int64_t>(row) * stack.width, stack.width);
            });
        }
    }

    // A layer in two parts: after the first, all keys and values of this pass are there.
    void begin_layer(int index) {
        const Layer& layer = stack.layers[index];
        capture(index);
        multiply(layer.qkv, block_input(layer), {work.qkv, num_outputs(layer.qkv), false}, &layer.o);
        rotate_and_write(layer, stack.kv[index]);
    }

    void end_layer(int index) {
        const Layer& layer = stack.layers[index];
        AttentionArgs attention = work.attention;
        attention.kv = stack.kv[index];
        attention.q_stride = num_outputs(layer.qkv);
        attention.window = layer.window;
        const bool at_once = quantizes_at_once(layer.o, layer.head_dim);
        if (at_once) {
            attention.reader = &layer.o;
            attention.codes = activations(layer.o, work.attended, layer.o.k, tokens(), work.ready);
        }
        attend(attention, work.together, work.transposed, team);
        const Activations attended = at_once ? attention.codes : prepare(layer.o, work.attended, layer.o.k);
        multiply(layer.o, attended, {hidden, stack.width, true}, &layer.gate_up, 2);
        feed_forward(layer, index + 1 < stack.num_layers ? &stack.layers[index + 1].qkv : nullptr);
        if (index + 1 == stack.num_layers) capture(index + 1);
    }
};

// Lay out what rows keep from one loop to the next, and plan their attention; in two passes, as a Scratch wants it.
static PlanSize lay_out_rows(Scratch& scratch, bool for_good, const Stack& stack, const Batch& batch, int team, Workspace& work) {
    const Layer& first = stack.layers[0];
    const int group = first.heads / first.kv_heads;
    const PlanSize size = plan_size(batch, group, team);
    int64_t qkv = 0;
    for (int i = 0; i < stack.num_layers; ++i) qkv = num_outputs(stack.layers[i].qkv) > qkv ? num_outputs(stack.layers[i].qkv) : qkv;
    int64_t* slots = scratch.take<int64_t>(size.keys + 1);
    int64_t* tails = scratch.take<int64_t>(64 * size.tokens);
    TokenView* views = scratch.take<TokenView>(size.tokens);
    QueryBlock* blocks = scratch.take<QueryBlock>(size.blocks + 1);
    work.qkv = scratch.take<float>(qkv * batch.tokens);
    work.together = size.together;
    if (for_good) work.attention.plan = make_plan(batch, group, size.block_tokens, slots, tails, views, blocks);
    return size;
}

// Lay out what a team needs within a loop, for so many tokens that see `longest` keys at most.
static void lay_out_team(Scratch& scratch, const Stack& stack, const PlanSize& plan, int tokens, int64_t longest, int team, Workspace& work) {
    const Layer& first = stack.layers[0];
    int64_t normed = 0, codes = 0, wide = 0, uneven = 0;
    for (int i = 0; i < stack.num_layers; ++i) {
        const Layer& layer = stack.layers[i];
        for (const Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
            const int64_t need = (activation_bytes(tokens, *w) + 63) / 64 * 64;
            codes = need > codes ? need : codes;
        }
        normed = layer.qkv.k > normed ? layer.qkv.k : normed;
        normed = stack.width > normed ? stack.width : normed;
        wide = layer.intermediate > wide ? layer.intermediate : wide;
        if (layer.intermediate % 16 != 0) uneven = wide;
    }
    work.repeat = team > 1 && tokens < 2 * team;
    const int copies = work.repeat ? team : 1;
    work.own_size = 2 * 16 * kMostPanels * static_cast<int64_t>(tokens);
    work.normed_size = (normed * tokens + 15) / 16 * 16;
    work.codes_size = codes;
    work.own = scratch.take<float>(team * work.own_size);
    work.normed = scratch.take<float>(copies * work.normed_size);
    work.codes = scratch.take<char>(copies * work.codes_size);
    work.ready = scratch.take<char>(work.codes_size);
    work.attended = scratch.take<float>(static_cast<int64_t>(first.heads) * first.head_dim * tokens);
    work.gate_up = scratch.take<float>(2 * uneven * tokens);
    work.activated = scratch.take<float>(wide * tokens);
    const int padded = static_cast<int>((longest + 31) / 16 * 16);
    const AttentionSize size = attention_size(plan, first.heads / first.kv_heads, padded, first.kv_heads, first.head_dim, team);
    float* scores = scratch.take<float>(size.scores);
    float* inverse = scratch.take<float>(size.inverse);
    work.transposed = scratch.take<float>(size.transposed);
    work.attention = {work.attention.plan, {}, work.qkv, work.attended, 0, static_cast<int64_t>(first.heads) * first.head_dim,
                      first.heads, first.kv_heads, first.head_dim, 0, scores, inverse, nullptr, {}};
}

SLIP_INLINE int64_t longest_keys(const Batch& batch) {
    int64_t longest = 0;
    for (int r = 0; r < batch.requests; ++r) longest = batch.kv_lens[r] > longest ? batch.kv_lens[r] : longest;
    return longest;
}

// Some of a pass's rows, as a pass of their own.
constexpr int kMostMembers = 4, kPartsEach = 4, kMostRequests = 64, kMostCaptured = 8;
constexpr int kPartRows = 24;  // that a part has at least before a member takes more than one

struct Part {
    Stack stack;
    Batch batch;
    Workspace work{};
    int first = 0;
    int32_t starts[kMostRequests + 1];
    float* captured_out[kMostCaptured];

    void cut(const Stack& whole, const Batch& all, int begin, int end) {
        int request = 0;
        while (all.query_starts[request + 1] <= begin) ++request;
        first = begin;
        batch = all;
        batch.kv_lens += request;
        batch.page_table += request * all.page_table_stride;
        batch.kv_index += begin;
        batch.ancestors += begin;
        batch.slots += begin;
        batch.positions += begin;
        batch.query_starts = starts;
        batch.tokens = end - begin;
        starts[batch.requests = 0] = 0;
        for (; all.query_starts[request] < end && request < all.requests; ++request) {
            const int stop = all.query_starts[request + 1] < end ? all.query_starts[request + 1] : end;
            starts[++batch.requests] = stop - begin;
        }
        stack = whole;
        for (int i = 0; i < whole.num_captured; ++i) captured_out[i] = whole.captured_out[i] + static_cast<int64_t>(begin) * whole.width;
        stack.captured_out = captured_out;
    }
};

SLIP_INLINE int weight_bits(const Linear& w) {
    int most = 0;
    for (const Linear* run = &w; run; run = run->rest) {
        const int bits = run->format == F32 ? 32 : is_dense(run->format) ? 16 : code_bits(run->format);
        most = bits > most ? bits : most;
    }
    return most;
}

// Parts to cut a pass into, one for each member, or 1. With enough rows arithmetic takes longer than reading all weights, so
// that each member may read them all (members that share a cache read them from memory once) and keep its rows to itself.
// When members share out every product instead, each reads half of what it needs from another's cache, which on cores
// without a cache in common makes a pass over 8 rows a third longer.
static int num_parts(const Stack& stack, const Batch& batch, int team) {
    if (team > kMostMembers || batch.requests > kMostRequests || stack.num_captured > kMostCaptured) return 1;
    int bits = 0;
    for (int i = 0; i < stack.num_layers; ++i) {
        const Layer& layer = stack.layers[i];
        for (const Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) bits = weight_bits(*w) > bits ? weight_bits(*w) : bits;
    }
    if (team == 1 || batch.tokens < bits * team) return 1;
    const int each = batch.tokens / (team * kPartRows);
    return team * (each < 1 ? 1 : each > kPartsEach ? kPartsEach : each);
}

// The keys whose attention takes a row as long as its products: those take 11 cycles for 32 columns of 16 outputs where
// codes are multiplied, and 32 where floats are; 16 of a key's values take a cycle, twice, and its softmax and transposing
// a quarter more.
static double keys_per_product(const Layer& layer) {
    double products = 0;
    for (const Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
        products += static_cast<double>(num_outputs(*w)) * w->k / 512 * (is_dense(w->format) ? 32 : 11);
    return products / (1.25 * layer.heads * layer.head_dim / 8);
}

// Cut a pass into parts that take about as long: later tokens of a prompt see more keys.
static void cut_parts(const Stack& stack, const Batch& batch, int num, Part* parts) {
    const double keys = keys_per_product(stack.layers[0]);
    const auto cost = [&](int row) { return keys + static_cast<double>(batch.kv_index[row]); };
    double whole = 0, done = 0;
    for (int row = 0; row < batch.tokens; ++row) whole += cost(row);
    for (int i = 0, row = 0; i < num; ++i) {
        const int begin = row, most = batch.tokens - (num - 1 - i);
        for (; row < most && (row == begin || i + 1 == num || done + cost(row) / 2 < whole * (i + 1) / num); ++row) done += cost(row);
        parts[i].cut(stack, batch, begin, row);
    }
}

static void run_parts(Pool& pool, Scratch& scratch, const Stack& stack, const Batch& batch, int num, float* hidden, const float* embedding) {
    Part parts[kMostMembers * kPartsEach];
    Workspace members[kMostMembers]{};
    cut_parts(stack, batch, num, parts);
    for (int pass = 0; pass < 2; ++pass) {  // measure, then lay out
        scratch.begin(pass == 1);
        PlanSize largest{};
        int tokens = 0;
        int64_t longest = 0;
        for (int i = 0; i < num; ++i) {
            const PlanSize size = lay_out_rows(scratch, pass == 1, parts[i].stack, parts[i].batch, 1, parts[i].work);
            if (parts[i].batch.tokens > tokens) tokens = parts[i].batch.tokens;
            if (longest_keys(parts[i].batch) > longest) longest = longest_keys(parts[i].batch);
            largest = size;  // a member needs memory for one block, which is as large in every part
        }
        for (int i = 0; i < pool.size(); ++i) lay_out_team(scratch, stack, largest, tokens, longest, 1, members[i]);
    }
    pool.run(2 * stack.num_layers, [&](Team& team) {
        Team alone{0, 1, nullptr, nullptr, 0};
        Workspace work = members[team.id];
        const auto walk = [&](int i) {
            const int64_t first = static_cast<int64_t>(parts[i].first) * stack.width;
            work.qkv = parts[i].work.qkv;
            work.attention.q = work.qkv;
            work.attention.plan = parts[i].work.attention.plan;
            return Walk{parts[i].stack, parts[i].batch, work, hidden + first, embedding ? embedding + first : nullptr, alone};
        };
        for (int index = 0; index < stack.num_layers; ++index) {
            team.share(num, 1, [&](int i, int) { walk(i).begin_layer(index); });
            team.share(num, 1, [&](int i, int) { walk(i).end_layer(index); });
        }
    });
}

static void run_layers(Pool& pool, Scratch& scratch, const Stack& stack, const Batch& batch, float* hidden, const float* embedding) {
    if (batch.tokens == 0 || stack.num_layers == 0) return;
    const int parts = num_parts(stack, batch, pool.size());
    if (parts > 1) return run_parts(pool, scratch, stack, batch, parts, hidden, embedding);
    Workspace work{};
    for (int pass = 0; pass < 2; ++pass) {
        scratch.begin(pass == 1);
        const PlanSize plan = lay_out_rows(scratch, pass == 1, stack, batch, pool.size(), work);
        lay_out_team(scratch, stack, plan, batch.tokens, longest_keys(batch), pool.size(), work);
    }
    pool.run((kPhasesPerLayer + stack.num_captured) * (stack.num_layers + 1), [&](Team& team) {
        Walk walk{stack, batch, work, hidden, embedding, team};
        for (int index = 0; index < stack.num_layers; ++index) {
            walk.begin_layer(index);
            walk.end_layer(index);
        }
    });
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
