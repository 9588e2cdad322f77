// Sampling with each row's own settings, as ../../sampling.py defines it: penalties, bias, masks, minimum length,
// truncation by whole weights, and log probabilities. Rows that use none of it go through the plain rule of sample.h.
#pragma once
#include <algorithm>

#include "sample.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kCell = 64;  // tokens of which the highest logit is kept, to find the best k
constexpr uint32_t kWeightOne = 1u << 31;

// 2^31 * 2^-y, for y from 0 to 63.
SLIP_INLINE uint32_t weight_at(float y) {
    const int32_t whole = static_cast<int32_t>(y);
    const float f = y - static_cast<float>(whole);
    const float power = ((((-0x1.ef66d2p-11f * f + 0x1.2da7d4p-7f) * f + -0x1.c4fef8p-5f) * f + 0x1.ebe392p-3f) * f + -0x1.62e3bcp-1f) * f + 1.0f;
    // As a signed number of half the size: vectors convert no others.
    const uint32_t fixed = static_cast<uint32_t>(static_cast<int32_t>(power * 0x1p30f)) << 1;
    return (fixed >> (whole & 31)) & static_cast<uint32_t>((whole - 32) >> 31);
}

SLIP_INLINE float distance_of(float logit, float highest, float temperature) { return (highest - logit) / temperature * 0x1.715476p+0f; }

SLIP_INLINE uint32_t weight_of(float logit, float highest, float temperature) {
    if (logit == highest) return kWeightOne;
    const float y = distance_of(logit, highest, temperature);
    return weight_at(y < 63.0f ? y : 63.0f);
}

// The sum of the weights of all tokens; what is no number weighs nothing. Loops apart, so that each becomes vectors.
static int64_t total_weight(const float* logits, int64_t vocab, float highest, float temperature) {
    int64_t total = 0, begin = 0;
    for (; begin + kLanes <= vocab && highest < __builtin_inff(); begin += kLanes) {
        float y[kLanes];
        uint32_t weights[kLanes];
        for (int i = 0; i < kLanes; ++i) y[i] = distance_of(logits[begin + i], highest, temperature);
        for (int i = 0; i < kLanes; ++i) y[i] = y[i] < 63.0f ? y[i] : 63.0f;
        for (int i = 0; i < kLanes; ++i) weights[i] = weight_at(y[i]);
        uint64_t sum = 0;
        for (int i = 0; i < kLanes; ++i) sum += weights[i];
        total += static_cast<int64_t>(sum);
    }
    for (; begin < vocab; ++begin) total += weight_of(logits[begin], highest, temperature);
    return total;
}

// A token where it stands among others: by logit, highest first, equal ones by id.
struct Ranked {
    float logit;
    int64_t token;
};
SLIP_INLINE bool ranks_before(const Ranked& a, const Ranked& b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); }

// Memory for one row at a time.
struct SampleBuffers {
    float *logits, *cells;
    Ranked* found;

    void take(Scratch& scratch, int64_t vocab) {
        logits = scratch.take<float>(vocab);
        cells = scratch.take<float>(2 * ((vocab + kCell - 1) / kCell));
        found = scratch.take<Ranked>(vocab);
    }
};

static SampleBuffers* take_buffers(Scratch& scratch, int count, int64_t vocab, bool for_good) {
    SampleBuffers* buffers = scratch.take<SampleBuffers>(count);
    for (int member = 0; member < count; ++member) {
        SampleBuffers own{};
        own.take(scratch, vocab);
        if (for_good) buffers[member] = own;
    }
    return buffers;
}

// Put the best k tokens above -inf into `own.found`, in order; return how many there are. They lie in cells whose highest
// logit is among the k highest.
static int64_t find_best(const float* logits, int64_t vocab, int64_t k, const SampleBuffers& own) {
    const int64_t num_cells = (vocab + kCell - 1) / kCell;
    float *cells = own.cells, *sorted = own.cells + num_cells;
    for (int64_t c = 0; c < num_cells; ++c) cells[c] = sorted[c] = top_of(logits, c * kCell, (c + 1) * kCell < vocab ? (c + 1) * kCell : vocab);
    float bar = -__builtin_inff();
    if (k <= num_cells) {
        std::nth_element(sorted, sorted + (k - 1), sorted + num_cells, [](float a, float b) { return a > b; });
        bar = sorted[k - 1];
    }
    int64_t found = 0;
    for (int64_t c = 0; c < num_cells; ++c) {
        if (!(cells[c] >= bar)) continue;
        const int64_t end = (c + 1) * kCell < vocab ? (c + 1) * kCell : vocab;
        for (int64_t i = c * kCell; i < end; ++i)
            if (logits[i] >= bar && logits[i] > -__builtin_inff()) own.found[found++] = {logits[i], i};
    }
    if (found > k) {
        std::nth_element(own.found, own.found + k, own.found + found, ranks_before);
        found = k;
    }
    std::sort(own.found, own.found + found, ranks_before);
    return found;
}

// One row and what decides its token; `sure` is the score of its highest logit.
struct RowRule {
    const Slot* slot;
    Row row;
    int64_t vocab;
    float highest, sure;
};

// The token drawn from the found ones, which are in order, among those that top-p and min-p keep.
static int64_t draw_found(const RowRule& rule, const Ranked* found, int64_t count) {
    int64_t total = 0, before = 0;
    for (int64_t i = 0; i < count; ++i) total += weight_of(found[i].logit, rule.highest, rule.row.temperature);
    const double bar = rule.slot->top_p * static_cast<double>(total), least = rule.slot->min_p * 0x1p31;
    Best best{-__builtin_inff(), -1};
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t weight = weight_of(found[i].logit, rule.highest, rule.row.temperature);
        if (i > 0 && rule.slot->top_p < 1.0 && !(static_cast<double>(before) < bar)) break;
        before += weight;
        if (!(static_cast<double>(weight) >= least)) continue;
        const float score = exact_score(rule.row, found[i].token);
        if (score > best.score || (score == best.score && found[i].token < best.index)) best = {score, found[i].token};
    }
    return best.index;
}

// The token drawn from those before `bound` that min-p keeps; a bound past the last token leaves all.
static int64_t draw_before(const RowRule& rule, const Ranked& bound) {
    const Row& row = rule.row;
    const double least = rule.slot->min_p * 0x1p31;
    Best best{-__builtin_inff(), -1};
    const auto search = [&](const auto& keeps) {
        for (int64_t begin = 0; begin < rule.vocab; begin += kSegment) {
            const Best here = best_of_span(row, begin, begin + kSegment < rule.vocab ? begin + kSegment : rule.vocab, rule.sure, keeps);
            if (here.score > best.score) best = here;
        }
    };
    if (least <= 0.0 && bound.token == rule.vocab) {
        search(KeepAll());
    } else {
        search([&](int64_t token) {
            const float logit = row.logits[token];
            if (!ranks_before({logit, token}, bound)) return false;
            return least <= 0.0 || static_cast<double>(weight_of(logit, rule.highest, row.temperature)) >= least;
        });
    }
    return best.index;
}

// The weight before a token; `with` takes that of all tokens of its logit and above.
static int64_t weight_before(const RowRule& rule, const Ranked& own, int64_t* with) {
    int64_t before = 0, reached = 0;
    for (int64_t begin = 0; begin < rule.vocab; begin += kLanes) {
        const int64_t end = begin + kLanes < rule.vocab ? begin + kLanes : rule.vocab;
        if (!(top_of(rule.row.logits, begin, end) >= own.logit)) continue;
        for (int64_t i = begin; i < end; ++i) {
            if (!(rule.row.logits[i] >= own.logit)) continue;
            const uint32_t weight = weight_of(rule.row.logits[i], rule.highest, rule.row.temperature);
            reached += weight;
            if (ranks_before({rule.row.logits[i], i}, own)) before += weight;
        }
    }
    *with = reached;
    return before;
}

// The token of a row that truncates without top-k. If top-p does not keep the token drawn, it keeps none behind it either:
// the token is then drawn from those before.
static int64_t draw_nucleus(const RowRule& rule) {
    Ranked own{-__builtin_inff(), rule.vocab};
    own.token = draw_before(rule, own);
    if (rule.slot->top_p >= 1.0) return own.token;
    int64_t total = -1;
    for (;;) {
        own.logit = rule.row.logits[own.token];
        int64_t with = 0;
        const int64_t before = weight_before(rule, own, &with);
        // A part of the sum is enough to keep a token, and nearly always does.
        if (before == 0 || static_cast<double>(before) < rule.slot->top_p * static_cast<double>(with)) return own.token;
        if (total < 0) total = total_weight(rule.row.logits, rule.vocab, rule.highest, rule.row.temperature);
        if (static_cast<double>(before) < rule.slot->top_p * static_cast<double>(total)) return own.token;
        own.token = draw_before(rule, own);
    }
}

SLIP_INLINE float penalised(float logit, const Slot& slot, int32_t said) {
    const float repetition = static_cast<float>(slot.repetition), count = static_cast<float>(said >> 1);
    if (said > 0) logit = logit > 0.0f ? logit / repetition : logit * repetition;
    logit = logit - static_cast<float>(slot.frequency) * count;
    return logit - static_cast<float>(slot.presence) * (said > 1 ? 1.0f : 0.0f);
}

// Penalise what was said; tokens on the path, of at most 64, count too.
static void penalise(const Slot& slot, const int32_t* said, const int64_t* path, int depth, int64_t vocab, float* logits) {
    constexpr int kPath = 64;
    float before[kPath];
    const int length = depth < kPath ? depth : kPath;
    for (int d = 0; d < length; ++d)
        if (path[d] >= 0 && path[d] < vocab) before[d] = logits[path[d]];
    for (int64_t begin = 0; begin < vocab; begin += kLanes) {
        const int64_t end = begin + kLanes < vocab ? begin + kLanes : vocab;
        int32_t any = 0;
        for (int64_t i = begin; i < end; ++i) any |= said[i];
        if (!any) continue;
        for (int64_t i = begin; i < end; ++i)
            if (said[i]) logits[i] = penalised(logits[i], slot, said[i]);
    }
    for (int d = 0; d < length; ++d) {
        if (path[d] < 0 || path[d] >= vocab) continue;
        int32_t count = said[path[d]];
        for (int other = 0; other < length; ++other) count += 2 * (path[other] == path[d]);
        logits[path[d]] = penalised(before[d], slot, count);
    }
}

// Whether a mask leaves anything but end tokens.
static bool leaves_others(const int32_t* words, int64_t num_words, const int32_t* ends, int64_t vocab) {
    for (int64_t w = 0; 32 * w < vocab && w < num_words; ++w) {
        const uint32_t real = vocab - 32 * w >= 32 ? ~0u : (1u << (vocab - 32 * w)) - 1u;
        if (static_cast<uint32_t>(words[w]) & ~static_cast<uint32_t>(ends[w]) & real) return true;
    }
    return false;
}

// Rule out the tokens whose bit, flipped or not, is set; bits past the last word are not.
static void rule_out(const int32_t* words, int64_t num_words, uint32_t flip, int64_t vocab, float* logits) {
    for (int64_t begin = 0; begin < vocab; begin += 32) {
        const uint32_t out = (begin / 32 < num_words ? static_cast<uint32_t>(words[begin / 32]) : 0u) ^ flip;
        if (!out) continue;
        const int count = static_cast<int>(vocab - begin < 32 ? vocab - begin : 32);
        for (int i = 0; i < count; ++i) logits[begin + i] = (out >> i) & 1u ? -__builtin_inff() : logits[begin + i];
    }
}

enum Uses : int64_t { PENALTIES = 1, BIAS = 2, TOP_K = 4, TRUNCATION = 28 };

// Whether a row wants more than argmax(logits / T + noise).
SLIP_INLINE bool is_special(const SampleCall& call, int64_t row) {
    const Slot& slot = call.state.slots[call.slot[row]];
    return slot.uses != 0 || call.position[row] < slot.min_until || (call.mask_row && call.mask_row[row] >= 0);
}

// The token of a special row; its logits may be overwritten, unless their log probabilities are wanted.
static int64_t sample_row(const SampleCall& call, int64_t index, float* logits, const SampleBuffers& own) {
    const SlotTable& state = call.state;
    const int64_t at = call.slot[index], vocab = state.vocab;
    const Slot& slot = state.slots[at];
    const int32_t* mask = call.mask_row && call.mask_row[index] >= 0 ? call.words + call.mask_row[index] * call.num_words : nullptr;
    bool waits = call.position[index] < slot.min_until;
    if (slot.num_top >= 0 && (mask || waits || (slot.uses & (PENALTIES | BIAS)))) {
        std::memcpy(own.logits, logits, sizeof(float) * static_cast<size_t>(vocab));
        logits = own.logits;
    }
    if (slot.uses & PENALTIES) penalise(slot, state.said + at * vocab, call.path + index * call.depth, call.depth, vocab, logits);
    if (slot.uses & BIAS)
        for (int64_t i = 0; i < vocab; ++i) logits[i] += state.bias[at * vocab + i];
    const int32_t* ends = state.ends + at * state.end_words;
    if (waits && mask) waits = leaves_others(mask, call.num_words, ends, vocab);
    if (mask) rule_out(mask, call.num_words, ~0u, vocab, logits);
    if (waits) rule_out(ends, state.end_words, 0u, vocab, logits);
    const Best top = largest(logits, 0, vocab);
    if (top.score == -__builtin_inff()) return -1;
    const Row row{logits, static_cast<float>(slot.temperature), slot.seed, call.position[index]};
    if (!(row.temperature > 0.0f)) return top.index;
    const RowRule rule{&slot, row, vocab, top.score, exact_score(row, top.index)};
    if (rule.sure == -__builtin_inff()) return 0;  // logit / T is -inf for every token, so that all are equal
    if (slot.uses & TOP_K) return draw_found(rule, own.found, find_best(logits, vocab, slot.top_k, own));
    return draw_nucleus(rule);
}

// The log probabilities of a row, of its token and of as many of the best as its slot wants.
static void score_row(const SampleCall& call, int64_t index, const float* logits, const SampleBuffers& own, const SampleOut& out) {
    const Slot& slot = call.state.slots[call.slot[index]];
    const int64_t vocab = call.state.vocab, token = out.tokens[index];
    const float highest = top_of(logits, 0, vocab);
    const double norm = highest + std::log(static_cast<double>(total_weight(logits, vocab, highest, 1.0f)) / 0x1p31);
    const auto score = [&](float logit) { return logit > -__builtin_inff() ? static_cast<float>(logit - norm) : -__builtin_inff(); };
    out.logprob[index] = token < 0 ? -__builtin_inff() : score(logits[token]);
    int64_t* ids = out.top_ids + index * kMaxTop;
    float* scores = out.top_logprobs + index * kMaxTop;
    const int64_t found = slot.num_top > 0 ? find_best(logits, vocab, slot.num_top, own) : 0;
    for (int i = 0; i < kMaxTop; ++i) {
        ids[i] = i < found ? own.found[i].token : -1;
        scores[i] = i < found ? score(own.found[i].logit) : -__builtin_inff();
    }
}

// The tokens of some rows of logits [rows, vocab]; -1 where there is none. Rows that want log probabilities keep their
// logits, others need not.
static void sample_tokens(Pool& pool, Scratch& scratch, const SampleCall& call, float* logits, int64_t* tokens) {
    const int64_t vocab = call.state.vocab;
    if (call.rows == 0 || vocab == 0) return;
    int count = 0;
    for (int64_t row = 0; row < call.rows; ++row) count += is_special(call, row);
    float* temperature = nullptr;
    int64_t* seed = nullptr;
    uint8_t* special = nullptr;
    Best* best = nullptr;
    SampleBuffers* buffers = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        scratch.begin(pass == 1);
        temperature = scratch.take<float>(call.rows);
        seed = scratch.take<int64_t>(call.rows);
        special = scratch.take<uint8_t>(call.rows);
        best = scratch.take<Best>(call.rows * num_segments(vocab));
        buffers = take_buffers(scratch, count ? pool.size() : 0, vocab, pass == 1);
    }
    for (int64_t row = 0; row < call.rows; ++row) {
        const Slot& slot = call.state.slots[call.slot[row]];
        temperature[row] = static_cast<float>(slot.temperature);
        seed[row] = slot.seed;
        special[row] = is_special(call, row);
    }
    if (count < call.rows) choose_rows(pool, best, logits, call.rows, vocab, {temperature, seed, call.position}, special, -1, tokens);
    if (!count) return;
    pool.run(1, [&](Team& team) {
        team.share(static_cast<int>(call.rows), 1, [&](int row, int) {
            if (special[row]) tokens[row] = sample_row(call, row, logits + row * vocab, buffers[team.id]);
        });
    });
}

// The log probabilities of the rows that want them and are not to be skipped; their tokens are known.
static void score_tokens(Pool& pool, Scratch& scratch, const SampleCall& call, const float* logits, const uint8_t* skip, const SampleOut& out) {
    const int64_t vocab = call.state.vocab;
    const auto wants = [&](int64_t row) { return call.state.slots[call.slot[row]].num_top >= 0 && !(skip && skip[row]); };
    bool any = false;
    for (int64_t row = 0; row < call.rows; ++row) any |= wants(row);
    if (!any || vocab == 0) return;
    SampleBuffers* buffers = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        scratch.begin(pass == 1);
        buffers = take_buffers(scratch, pool.size(), vocab, pass == 1);
    }
    pool.run(1, [&](Team& team) {
        team.share(static_cast<int>(call.rows), 1, [&](int row, int) {
            if (wants(row)) score_row(call, row, logits + row * vocab, buffers[team.id], out);
        });
    });
}

static void sample(Pool& pool, Scratch& scratch, const SampleCall& call, float* logits, const SampleOut& out) {
    sample_tokens(pool, scratch, call, logits, out.tokens);
    score_tokens(pool, scratch, call, logits, nullptr, out);
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
