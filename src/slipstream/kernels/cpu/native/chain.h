// A chain of drafted tokens as one call: embed, run the draft's blocks, norm, head, best token, level after level.
#pragma once
#include "copies.h"
#include "repack.h"

namespace slip {
namespace SLIP_NAMESPACE {

static void embed_token(const Embedding& table, int64_t id, int width, float* out) {
    if (!is_dense(table.format)) return unpack_row(table.format, static_cast<const uint8_t*>(table.rows), id, width, out);
    for (int i = 0; i < width; i += 16) {
        const int64_t at = id * width + i;
        const int n = width - i < 16 ? width - i : 16;
        const V row = table.format == F32 ? load_weights_n<F32>(table.rows, at, n)
                                          : table.format == BF16 ? load_weights_n<BF16>(table.rows, at, n) : load_weights_n<F16>(table.rows, at, n);
        vstore_n(out + i, row, n);
    }
}

// Logits of up to 64 borrowed tokens from `first` on. A row's sum runs over 16 lanes of columns and one tree; four rows go
// side by side, since one alone would wait for each of its own steps.
static void borrowed_logits(const Borrowed& borrowed, int first, int count, const float* x, int width, float* out) {
    for (int at = 0; at < count; at += 4) {
        const float* rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = borrowed.rows + static_cast<int64_t>(first + (at + i < count ? at + i : at)) * width;
        V sum[4] = {vzero(), vzero(), vzero(), vzero()};
        int column = 0;
        for (; column + 16 <= width; column += 16) {
            const V value = vload(x + column);
            for (int i = 0; i < 4; ++i) sum[i] = vfma(value, vload(rows[i] + column), sum[i]);
        }
        if (column < width) {
            const V value = vload_n(x + column, width - column);
            for (int i = 0; i < 4; ++i) sum[i] = vfma(value, vload_n(rows[i] + column, width - column), sum[i]);
        }
        for (int i = 0; i < 4 && at + i < count; ++i) out[at + i] = vsum(sum[i]) + borrowed.bonus;
    }
}

// The best token of a row, what the rule makes of its logit, and its log-probability.
struct Pick {
    int64_t token;
    float value;
    float score;
};

// Let borrowed tokens stand beside the draft's own, of which `own` is the best: return the best of all, scored among all.
// `x` is what the head reads.
static Pick best_with(const Borrowed& borrowed, Pick own, const float* x, int width, const Row& row) {
    double top = own.value - own.score, total = 1.0;  // the draft's own tokens add up to exp(top)
    for (int first = 0; first < borrowed.count; first += kLanes) {
        const int count = borrowed.count - first < kLanes ? borrowed.count - first : kLanes;
        float logits[kLanes], values[kLanes];
        borrowed_logits(borrowed, first, count, x, width, logits);
        rough_perturb(logits, borrowed.tokens + first, count, row, values);
        for (int i = 0; i < count; ++i) {
            if (values[i] > own.value) {
                own.value = values[i];
                own.token = borrowed.tokens[first + i];
            }
            if (values[i] > top) {
                total = total * std::exp(top - values[i]) + 1.0;
                top = values[i];
            } else {
                total += std::exp(values[i] - top);
            }
        }
    }
    own.score = static_cast<float>(own.value - (top + std::log(total)));
    return own;
}

// The chains that go on, in order: a chain that fell below the floor is not drafted further, and its row goes to the next.
struct ChainRows {
    int32_t *who, *page_table;
    float *hidden, *temperature;
    int64_t *lengths, *seed;
    int count;

    void take(Scratch& scratch, const Chain& chain) {
        who = scratch.take<int32_t>(chain.requests);
        page_table = scratch.take<int32_t>(chain.requests * chain.page_table_stride);
        temperature = scratch.take<float>(chain.requests);
        lengths = scratch.take<int64_t>(chain.requests);
        seed = scratch.take<int64_t>(chain.requests);
    }

    void start(const Chain& chain) {
        count = chain.requests;
        hidden = chain.hidden;
        std::memcpy(page_table, chain.page_table, sizeof(int32_t) * static_cast<size_t>(count * chain.page_table_stride));
        for (int r = 0; r < count; ++r) {
            who[r] = r;
            temperature[r] = chain.temperature[r];
            lengths[r] = chain.lengths[r];
            seed[r] = chain.seed[r];
        }
    }

    void move(int from, int to, int64_t stride, int width) {
        if (from == to) return;
        who[to] = who[from];
        temperature[to] = temperature[from];
        lengths[to] = lengths[from];
        seed[to] = seed[from];
        std::memcpy(page_table + to * stride, page_table + from * stride, sizeof(int32_t) * static_cast<size_t>(stride));
        copy_row(hidden + static_cast<int64_t>(to) * width, hidden + static_cast<int64_t>(from) * width, width);
    }
};

// What the rows of a level come to. `entries` are the best of the draft's own tokens, which `name_tokens` replaces by tokens.
struct Level {
    Sampling sampling;
    const float* logits;
    const float* x;  // what the head reads
    float* scores;
    int64_t* entries;
};

// Turn each row's best entry into the best token of all, those its request has borrowed among them.
static void name_tokens(Pool& pool, const Draft& draft, const Chain& chain, const ChainRows& rows, int width, const Level& level) {
    const auto name = [&](int r) {
        const int64_t entry = level.entries[r];
        Pick best{draft.token_ids[entry], 0.0f, level.scores[r]};
        if (chain.borrowed && chain.borrowed[rows.who[r]].count > 0) {
            const Row row{nullptr, level.sampling.temperature[r], level.sampling.seed[r], level.sampling.position[r]};
            rough_perturb(level.logits + r * static_cast<int64_t>(draft.ends.head.n) + entry, &best.token, 1, row, &best.value);
            best = best_with(chain.borrowed[rows.who[r]], best, level.x + static_cast<int64_t>(r) * width, width, row);
        }
        level.entries[r] = best.token;
        level.scores[r] = best.score;
    };
    if (!chain.borrowed || rows.count == 1) {
        for (int r = 0; r < rows.count; ++r) name(r);
        return;
    }
    pool.run(1, [&](Team& team) {
        team.share(rows.count, 1, [&](int r, int) { name(r); });
    });
}

// `scratch` serves the calls made from here, `own` what lives from level to level.
static void draft_chain(Pool& pool, Scratch& scratch, Scratch& own, const Stack& stack, const Draft& draft, const Chain& chain) {
    const int requests = chain.requests, width = stack.width, depth = chain.depth;
    const int64_t vocab = draft.ends.head.n, stride = chain.page_table_stride;
    if (requests == 0 || depth == 0) return;
    ChainRows rows{};
    float *embedding = nullptr, *normed = nullptr, *logits = nullptr, *scores = nullptr;
    int32_t *starts = nullptr, *lengths = nullptr;
    int64_t *index = nullptr, *slots = nullptr, *causal = nullptr, *position = nullptr, *tokens = nullptr;
    Prospect* prospects = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        own.begin(pass == 1);
        rows.take(own, chain);
        embedding = own.take<float>(static_cast<int64_t>(requests) * width);
        normed = own.take<float>(static_cast<int64_t>(requests) * width);
        logits = own.take<float>(requests * vocab);
        scores = own.take<float>(requests);
        starts = own.take<int32_t>(requests + 1);
        lengths = own.take<int32_t>(requests);
        index = own.take<int64_t>(requests);
        slots = own.take<int64_t>(requests);
        causal = own.take<int64_t>(requests);
        position = own.take<int64_t>(requests);
        tokens = own.take<int64_t>(requests);
        prospects = own.take<Prospect>(requests);
    }
    rows.start(chain);
    for (int r = 0; r < requests; ++r) prospects[r].begin(chain.texts ? static_cast<const Text*>(chain.texts[r]) : nullptr);
    const double lowest = std::exp(chain.trust * chain.floor);
    for (int64_t i = 0; i < static_cast<int64_t>(requests) * depth; ++i) {
        chain.scores[i] = -__builtin_inff();
        chain.tokens[i] = 0;
    }
    for (int level = 0; level < depth; ++level) {
        const int count = rows.count;
        for (int r = 0; r < count; ++r) position[r] = rows.lengths[r] + 1 + level;  // of the token being guessed
        const float *foretold = chain.root_logits, *x = normed;
        if (level > 0) {
            for (int r = 0; r < count; ++r) {
                embed_token(draft.ends.embedding, tokens[r], width, embedding + static_cast<int64_t>(r) * width);
                index[r] = rows.lengths[r] + level - 1;
                slots[r] = static_cast<int64_t>(rows.page_table[r * stride + index[r] / chain.page_size]) * chain.page_size + index[r] % chain.page_size;
                causal[r] = -1;
                starts[r] = r;
                lengths[r] = static_cast<int32_t>(index[r] + 1);
            }
            starts[count] = count;
            const Batch batch{starts, lengths, rows.page_table, index, causal, slots, index, stride, count, count, chain.page_size, 0};
            run_layers(pool, scratch, stack, batch, rows.hidden, embedding);
            rms_norm(pool, rows.hidden, width, draft.ends.norm, normed, count, width, draft.ends.eps);
            linear(pool, scratch, draft.ends.head, normed, width, count, logits);
            if (draft.normed_feedback) copy_row(rows.hidden, normed, count * width);
            foretold = logits;
        } else if (draft.normed_feedback) {
            x = rows.hidden;
        } else if (chain.borrowed) {
            rms_norm(pool, rows.hidden, width, draft.ends.norm, normed, count, width, draft.ends.eps);
        }
        const Sampling sampling{rows.temperature, rows.seed, position};
        top_k(pool, scratch, {count, vocab, 1, 0}, foretold, draft.token_ids, sampling, scores, tokens);
        name_tokens(pool, draft, chain, rows, width, {sampling, foretold, x, scores, tokens});
        double worth = 0.0;
        rows.count = 0;
        for (int r = 0; r < count; ++r) {
            const int64_t at = static_cast<int64_t>(rows.who[r]) * depth + level;
            chain.scores[at] = (level > 0 ? chain.scores[at - 1] : 0.0f) + scores[r];
            chain.tokens[at] = tokens[r];
            Prospect& prospect = prospects[rows.who[r]];
            prospect.add(tokens[r], chain.scores[at], chain.trust);
            if (prospect.chance < lowest) continue;
            worth += std::max(prospect.worth() - lowest, 0.0);
            tokens[rows.count] = tokens[r];
            rows.move(r, rows.count++, stride, width);
        }
        if (rows.count == 0 || worth < chain.need) break;
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
