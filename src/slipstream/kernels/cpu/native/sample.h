// The one rule over a vocabulary: argmax(logits / T + noise(seed, position, token)), the noise of ../../reference/noise.py.
//
// The noise of every token is first approximated in single precision; only tokens that come within the approximation's
// error of the best are given their noise in double precision, so the token is that of the exact rule.
#pragma once
#include "abi.h"
#include "pool.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kLanes = 64;
constexpr float kNoiseReach = 22.875f + 3.131f + 0.05f;
constexpr int kSegment = 4096;

// Word `token % 4` of Philox4x32-10 for 64 tokens.
static void philox_words(const int64_t* tokens, int64_t position, int64_t seed, uint32_t* words) {
    uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        c0[i] = static_cast<uint32_t>(tokens[i] >> 2);
        c1[i] = static_cast<uint32_t>(position);
        c2[i] = c3[i] = 0;
    }
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < kLanes; ++i) {
            const uint64_t a = static_cast<uint64_t>(c0[i]) * 0xD2511F53u, b = static_cast<uint64_t>(c2[i]) * 0xCD9E8D57u;
            c0[i] = static_cast<uint32_t>(b >> 32) ^ c1[i] ^ k0;
            c1[i] = static_cast<uint32_t>(b);
            c2[i] = static_cast<uint32_t>(a >> 32) ^ c3[i] ^ k1;
            c3[i] = static_cast<uint32_t>(a);
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t lane = static_cast<uint32_t>(tokens[i]) & 3u;
        words[i] = lane < 2 ? (lane == 0 ? c0[i] : c1[i]) : (lane == 2 ? c2[i] : c3[i]);
    }
}

SLIP_INLINE float exact_noise(uint32_t word) {
    const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
    return static_cast<float>(-std::log(-std::log(u)));
}

// log y for normal y > 0, within 1e-6 of the truth or of its size.
SLIP_INLINE float rough_log(float y) {
    uint32_t bits;
    std::memcpy(&bits, &y, 4);
    const int32_t exponent = static_cast<int32_t>(bits - 0x3F3504F3u) >> 23;  // mantissa from sqrt(1/2) to sqrt(2)
    bits -= static_cast<uint32_t>(exponent) << 23;
    float m;
    std::memcpy(&m, &bits, 4);
    const float z = (m - 1.0f) / (m + 1.0f), zz = z * z;
    return static_cast<float>(exponent) * 0.69314718f +
           2.0f * z * (1.0f + zz * (1.0f / 3 + zz * (1.0f / 5 + zz * (1.0f / 7 + zz * (1.0f / 9)))));
}

SLIP_INLINE float rough_noise(uint32_t word) {
    const bool high = (word >> 31) != 0;  // u > 1/2: take -log u from 1 - u, which keeps its digits
    const float part = (static_cast<float>(static_cast<int32_t>(high ? ~word : word)) + 0.5f) * 0x1p-32f;
    const float z = part / (2.0f - part), zz = z * z;
    const float series = 2.0f * z * (1.0f + zz * (1.0f / 3 + zz * (1.0f / 5 + zz * (1.0f / 7 + zz * (1.0f / 9 + zz / 11)))));
    const float direct = -rough_log(part);
    return -rough_log(high ? series : direct);
}

SLIP_INLINE float rough_margin(float score) { return 2e-3f + 1e-6f * __builtin_fabsf(score); }

struct Best {
    float score;
    int64_t index;
};

static Best largest(const float* x, int64_t begin, int64_t end) {
    V top = vset(-__builtin_inff());
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) top = vmax(vload(x + i), top);
    float best = vmax_lane(top);
    for (; i < end; ++i) best = x[i] > best ? x[i] : best;
    for (i = begin; i < end; ++i)
        if (x[i] == best) return {best, i};
    return {best, begin};
}

// The best of a span under the rule; `ids` are the tokens' ids, or null where they are the indices themselves.
struct Row {
    const float* logits;
    const int64_t* ids;
    int64_t size;
    float temperature;
    int64_t seed;
    int64_t position;
};

// Fill words and rough scores of up to 64 tokens from `at`.
SLIP_INLINE void rough_scores(const Row& row, int64_t at, int count, uint32_t* words, float* scores) {
    int64_t tokens[kLanes];
    float scaled[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        const int64_t index = at + (i < count ? i : 0);
        tokens[i] = row.ids ? row.ids[index] : index;
        scaled[i] = i < count ? row.logits[index] / row.temperature : -__builtin_inff();
    }
    philox_words(tokens, row.position, row.seed, words);
    for (int i = 0; i < kLanes; ++i) scores[i] = scaled[i] + rough_noise(words[i]);
}

static Best best_of_span(const Row& row, int64_t begin, int64_t end, float floor) {
    uint32_t words[kSegment];
    float scores[kSegment];
    float top = -__builtin_inff();
    for (int64_t at = begin; at < end; at += kLanes) {
        const int count = static_cast<int>(end - at < kLanes ? end - at : kLanes);
        float* s = scores + (at - begin);
        if (largest(row.logits, at, at + count).score / row.temperature < floor) {
            for (int i = 0; i < kLanes; ++i) s[i] = -__builtin_inff();
            continue;
        }
        rough_scores(row, at, count, words + (at - begin), s);
        for (int i = 0; i < kLanes; ++i) top = s[i] > top ? s[i] : top;
    }
    Best best{-__builtin_inff(), begin};
    const float bar = top - 2.0f * rough_margin(top);
    for (int64_t i = 0; i < end - begin; ++i) {
        if (scores[i] < bar || scores[i] == -__builtin_inff()) continue;
        const float score = row.logits[begin + i] / row.temperature + exact_noise(words[i]);
        if (score > best.score) best = {score, begin + i};
    }
    return best;
}

static void choose(Pool& pool, Scratch& scratch, const float* logits, int64_t rows, int64_t vocab, const Sampling& s, int64_t* out) {
    if (rows == 0 || vocab == 0) return;
    const int64_t segments = (vocab + kSegment - 1) / kSegment;
    Best* best = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        scratch.begin(pass == 1);
        best = scratch.take<Best>(rows * segments);
    }
    const int items = static_cast<int>(rows * segments);
    const auto combine = [&](int64_t row) {
        Best winner = best[row * segments];
        for (int64_t i = 1; i < segments; ++i)
            if (best[row * segments + i].score > winner.score) winner = best[row * segments + i];
        return winner;
    };
    pool.run(2, [&](Team& team) {
        team.pieces(items, 1, [&](int item, int) {
            const int64_t row = item / segments, begin = item % segments * kSegment;
            best[item] = largest(logits + row * vocab, begin, begin + kSegment < vocab ? begin + kSegment : vocab);
        });
        team.barrier();
        bool warm = false;
        for (int64_t row = 0; row < rows; ++row) warm |= s.temperature[row] > 0.0f;
        if (!warm) return;
        if (team.id == 0)
            for (int64_t row = 0; row < rows; ++row) out[row] = combine(row).index;
        team.barrier();
        team.pieces(items, 1, [&](int item, int) {
            const int64_t row = item / segments, begin = item % segments * kSegment;
            if (!(s.temperature[row] > 0.0f)) return;
            const Row view{logits + row * vocab, nullptr, vocab, s.temperature[row], s.seed[row], s.position[row]};
            const float floor = view.logits[out[row]] / view.temperature - kNoiseReach;
            best[item] = best_of_span(view, begin, begin + kSegment < vocab ? begin + kSegment : vocab, floor);
        });
    });
    for (int64_t row = 0; row < rows; ++row) out[row] = combine(row).index;
}

static void perturb(Pool& pool, const float* logits, const int64_t* ids, int64_t rows, int64_t vocab, const Sampling& s, float* out) {
    if (rows == 0 || vocab == 0) return;
    const int64_t segments = (vocab + kSegment - 1) / kSegment;
    pool.run(1, [&](Team& team) {
        team.pieces(static_cast<int>(rows * segments), 1, [&](int item, int) {
            const int64_t row = item / segments, begin = item % segments * kSegment;
            const int64_t end = begin + kSegment < vocab ? begin + kSegment : vocab;
            const float* from = logits + row * vocab;
            float* to = out + row * vocab;
            if (!(s.temperature[row] > 0.0f)) {
                std::memcpy(to + begin, from + begin, sizeof(float) * static_cast<size_t>(end - begin));
                return;
            }
            for (int64_t at = begin; at < end; at += kLanes) {
                const int count = static_cast<int>(end - at < kLanes ? end - at : kLanes);
                int64_t tokens[kLanes];
                uint32_t words[kLanes];
                for (int i = 0; i < kLanes; ++i) tokens[i] = ids[at + (i < count ? i : 0)];
                philox_words(tokens, s.position[row], s.seed[row], words);
                for (int i = 0; i < count; ++i) to[at + i] = from[at + i] / s.temperature[row] + exact_noise(words[i]);
            }
        });
    });
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
