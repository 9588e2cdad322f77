// The one rule over a vocabulary: argmax(logits / T + noise(seed, position, token)), the noise of ../../reference/noise.py.
//
// The noise of every token is first approximated in single precision; only tokens that come within the approximation's
// error of the best are given their noise in double precision, so the token is that of the exact rule.
#pragma once
#include <type_traits>

#include "abi.h"
#include "pool.h"
#include "scratch.h"
#include "table.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kLanes = 64;
constexpr float kNoiseMax = 22.9f;
constexpr int kSegment = 4096;
SLIP_INLINE int64_t num_segments(int64_t vocab) { return (vocab + kSegment - 1) / kSegment; }

// Sixteen 32-bit words, and the two halves of their products with a constant.
#if SLIP_ISA == 2
using U = __m512i;
SLIP_INLINE U uload(const uint32_t* p) { return _mm512_loadu_si512(p); }
SLIP_INLINE U uset(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
SLIP_INLINE void ustore(uint32_t* p, U x) { _mm512_storeu_si512(p, x); }
SLIP_INLINE U uxor(U a, U b, U c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
SLIP_INLINE void umul(U a, uint32_t by, U& high, U& low) {
    const U even = _mm512_mul_epu32(a, uset(by)), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), uset(by));
    high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
    low = _mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
}
#elif SLIP_ISA == 1
struct U {
    __m256i a, b;
};
SLIP_INLINE U uload(const uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
SLIP_INLINE U uset(uint32_t x) { return {_mm256_set1_epi32(static_cast<int32_t>(x)), _mm256_set1_epi32(static_cast<int32_t>(x))}; }
SLIP_INLINE void ustore(uint32_t* p, U x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
SLIP_INLINE __m256i xor3(__m256i a, __m256i b, __m256i c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
SLIP_INLINE U uxor(U a, U b, U c) { return {xor3(a.a, b.a, c.a), xor3(a.b, b.b, c.b)}; }
SLIP_INLINE void mul8(__m256i a, __m256i by, __m256i& high, __m256i& low) {
    const __m256i even = _mm256_mul_epu32(a, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), by);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
SLIP_INLINE void umul(U a, uint32_t by, U& high, U& low) {
    const __m256i factor = _mm256_set1_epi32(static_cast<int32_t>(by));
    mul8(a.a, factor, high.a, low.a);
    mul8(a.b, factor, high.b, low.b);
}
#else
struct U {
    uint32_t x[16];
};
SLIP_INLINE U uload(const uint32_t* p) {
    U r;
    std::memcpy(r.x, p, sizeof(r.x));
    return r;
}
SLIP_INLINE U uset(uint32_t x) {
    U r;
    for (int i = 0; i < 16; ++i) r.x[i] = x;
    return r;
}
SLIP_INLINE void ustore(uint32_t* p, const U& a) { std::memcpy(p, a.x, sizeof(a.x)); }
SLIP_INLINE U uxor(const U& a, const U& b, const U& c) {
    U r;
    for (int i = 0; i < 16; ++i) r.x[i] = a.x[i] ^ b.x[i] ^ c.x[i];
    return r;
}
SLIP_INLINE void umul(U a, uint32_t by, U& high, U& low) {
    for (int i = 0; i < 16; ++i) {
        const uint64_t product = static_cast<uint64_t>(a.x[i]) * by;
        high.x[i] = static_cast<uint32_t>(product >> 32);
        low.x[i] = static_cast<uint32_t>(product);
    }
}
#endif

// The four output words of Philox4x32-10 for sixteen counters (counter, position, 0, 0), in words[4][16].
static void philox16(const uint32_t* counters, int64_t position, int64_t seed, uint32_t* words) {
    U c0 = uload(counters), c1 = uset(static_cast<uint32_t>(position)), c2 = uset(0), c3 = uset(0);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    for (int round = 0; round < 10; ++round) {
        U high0, low0, high1, low1;
        umul(c0, 0xD2511F53u, high0, low0);
        umul(c2, 0xCD9E8D57u, high1, low1);
        c0 = uxor(high1, c1, uset(k0));
        c2 = uxor(high0, c3, uset(k1));
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    ustore(words, c0);
    ustore(words + 16, c1);
    ustore(words + 32, c2);
    ustore(words + 48, c3);
}

// The words of 64 tokens with ids of their own.
static void words_of(const int64_t* tokens, int64_t position, int64_t seed, uint32_t* words) {
    for (int at = 0; at < kLanes; at += 16) {
        uint32_t counters[16], four[64];
        for (int i = 0; i < 16; ++i) counters[i] = static_cast<uint32_t>(tokens[at + i] >> 2);
        philox16(counters, position, seed, four);
        for (int i = 0; i < 16; ++i) words[at + i] = four[16 * (tokens[at + i] & 3) + i];
    }
}

// The words of tokens first .. first + 63, those of tokens 4 i + lane at [16 lane + i]; `first` is a multiple of 4.
static void words_from(int64_t first, int64_t position, int64_t seed, uint32_t* four) {
    uint32_t counters[16];
    for (int i = 0; i < 16; ++i) counters[i] = static_cast<uint32_t>((first >> 2) + i);
    philox16(counters, position, seed, four);
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
    const uint32_t high = 0u - (word >> 31);  // all ones where u > 1/2: take -log u from 1 - u, which keeps its digits
    const float part = (static_cast<float>(static_cast<int32_t>(word ^ high)) + 0.5f) * 0x1p-32f;
    const float z = part / (2.0f - part), zz = z * z;
    const float series = 2.0f * z * (1.0f + zz * (1.0f / 3 + zz * (1.0f / 5 + zz * (1.0f / 7 + zz * (1.0f / 9 + zz / 11)))));
    const float direct = -rough_log(part);
    uint32_t a, b;
    std::memcpy(&a, &series, 4);
    std::memcpy(&b, &direct, 4);
    a = (a & high) | (b & ~high);  // a branch here would keep the compiler from using vectors
    float chosen;
    std::memcpy(&chosen, &a, 4);
    return -rough_log(chosen);
}

SLIP_INLINE float rough_margin(float score) { return 2e-3f + 1e-6f * __builtin_fabsf(score); }

struct Best {
    float score;
    int64_t index;
};

static float top_of(const float* x, int64_t begin, int64_t end) {
    V top = vset(-__builtin_inff());
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) top = vmax(vload(x + i), top);
    float best = vmax_lane(top);
    for (; i < end; ++i) best = x[i] > best ? x[i] : best;
    return best;
}

static Best largest(const float* x, int64_t begin, int64_t end) {
    const float best = top_of(x, begin, end);
    for (int64_t i = begin; i < end; ++i)
        if (x[i] == best) return {best, i};
    return {best, begin};
}

struct Row {
    const float* logits;
    float temperature;
    int64_t seed;
    int64_t position;
};

// Rough scores of up to 64 tokens from `at` on, whose words are given.
SLIP_INLINE void rough_scores(const Row& row, int64_t at, int count, const uint32_t* words, float* scores) {
    float scaled[kLanes];
    if (count == kLanes)
        for (int i = 0; i < kLanes; ++i) scaled[i] = row.logits[at + i] / row.temperature;
    else
        for (int i = 0; i < kLanes; ++i) scaled[i] = i < count ? row.logits[at + i] / row.temperature : -__builtin_inff();
    for (int i = 0; i < kLanes; ++i) scores[i] = scaled[i] + rough_noise(words[i]);
}

// The score of one token.
static float exact_score(const Row& row, int64_t token) {
    uint32_t counters[16] = {static_cast<uint32_t>(token >> 2)}, words[64];
    philox16(counters, row.position, row.seed, words);
    return row.logits[token] / row.temperature + exact_noise(words[16 * (token & 3)]);
}

// No noise of these words is larger: -log(-log u) <= -log(1 - u), and 1 - u is at least a power of two.
SLIP_INLINE float most_noise(const uint32_t* four) {
    uint32_t most = 0;
    for (int i = 0; i < kLanes; ++i) most = four[i] > most ? four[i] : most;
    return 0.693148f * static_cast<float>(most == ~0u ? 33 : __builtin_clz(~most) + 1);
}

struct KeepAll {
    bool operator()(int64_t) const { return true; }
};

// The best of the tokens that `keeps` lets pass, if it reaches `sure`. Most blocks cannot, by their highest logit and the
// largest of their words.
template <class Keeps>
static Best best_of_span(const Row& row, int64_t begin, int64_t end, float sure, const Keeps& keeps) {
    uint32_t words[kSegment];
    float scores[kSegment], tops[kSegment / kLanes];
    float top = -__builtin_inff();
    for (int64_t at = begin; at < end; at += kLanes) {
        const int count = static_cast<int>(end - at < kLanes ? end - at : kLanes);
        const float scaled = top_of(row.logits, at, at + count) / row.temperature + rough_margin(sure);
        tops[(at - begin) / kLanes] = -__builtin_inff();
        if (!(scaled + kNoiseMax >= sure)) continue;
        uint32_t four[kLanes];
        words_from(at, row.position, row.seed, four);
        if (!(scaled + most_noise(four) >= sure)) continue;
        uint32_t* w = words + (at - begin);
        float* s = scores + (at - begin);
        for (int i = 0; i < 16; ++i)
            for (int lane = 0; lane < 4; ++lane) w[4 * i + lane] = four[16 * lane + i];
        rough_scores(row, at, count, w, s);
        if constexpr (!std::is_same_v<Keeps, KeepAll>)
            for (int i = 0; i < count; ++i) s[i] = keeps(at + i) ? s[i] : -__builtin_inff();
        const float best = tops[(at - begin) / kLanes] = top_of(s, 0, kLanes);
        top = best > top ? best : top;
        sure = best - rough_margin(best) > sure ? best - rough_margin(best) : sure;
    }
    Best best{-__builtin_inff(), begin};
    const float bar = top - 2.0f * rough_margin(top);
    for (int64_t i = 0; i < end - begin; ++i) {
        if (i % kLanes == 0 && (tops[i / kLanes] < bar || tops[i / kLanes] == -__builtin_inff())) {
            i += kLanes - 1;
            continue;
        }
        if (scores[i] < bar || scores[i] == -__builtin_inff()) continue;
        const float score = row.logits[begin + i] / row.temperature + exact_noise(words[i]);
        if (score > best.score) best = {score, begin + i};
    }
    return best;
}

// The rule over rows that are not to be skipped. `best` has space for each row's segments. Where nothing is above -inf, the
// token is `nothing`; where logits are, but logit / T is -inf for every token, all are equal, and it is the first.
static void choose_rows(Pool& pool, Best* best, const float* logits, int64_t rows, int64_t vocab, const Sampling& s, const uint8_t* skip, int64_t nothing, int64_t* out) {
    const int64_t segments = num_segments(vocab);
    const int items = static_cast<int>(rows * segments);
    const auto skipped = [&](int64_t row) { return skip && skip[row]; };
    const auto combine = [&](int64_t row) {
        Best winner = best[row * segments];
        for (int64_t i = 1; i < segments; ++i)
            if (best[row * segments + i].score > winner.score) winner = best[row * segments + i];
        return winner;
    };
    pool.run(3, [&](Team& team) {
        team.share(items, 1, [&](int item, int) {
            const int64_t row = item / segments, begin = item % segments * kSegment;
            if (skipped(row)) return;
            best[item] = largest(logits + row * vocab, begin, begin + kSegment < vocab ? begin + kSegment : vocab);
        });
        bool warm = false;
        for (int64_t row = 0; row < rows; ++row) warm |= !skipped(row) && s.temperature[row] > 0.0f;
        if (!warm) return;
        team.share(static_cast<int>(rows), 64, [&](int begin, int end) {
            for (int row = begin; row < end; ++row)
                if (!skipped(row)) out[row] = combine(row).index;
        });
        team.share(items, 1, [&](int item, int) {
            const int64_t row = item / segments, begin = item % segments * kSegment;
            if (skipped(row) || !(s.temperature[row] > 0.0f)) return;
            const Row view{logits + row * vocab, s.temperature[row], s.seed[row], s.position[row]};
            best[item] = best_of_span(view, begin, begin + kSegment < vocab ? begin + kSegment : vocab, exact_score(view, out[row]), KeepAll());
        });
    });
    for (int64_t row = 0; row < rows; ++row) {
        if (skipped(row)) continue;
        const Best winner = combine(row);
        const bool equal = s.temperature[row] > 0.0f && logits[row * vocab + out[row]] > -__builtin_inff();
        out[row] = winner.score > -__builtin_inff() ? winner.index : equal ? 0 : nothing;
    }
}

static void perturb(Pool& pool, const float* logits, const int64_t* ids, int64_t rows, int64_t vocab, const Sampling& s, float* out) {
    if (rows == 0 || vocab == 0) return;
    const int64_t segments = (vocab + kSegment - 1) / kSegment;
    pool.run(1, [&](Team& team) {
        team.share(static_cast<int>(rows * segments), 1, [&](int item, int) {
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
                words_of(tokens, s.position[row], s.seed[row], words);
                for (int i = 0; i < count; ++i) to[at + i] = from[at + i] / s.temperature[row] + exact_noise(words[i]);
            }
        });
    });
}

// Up to 64 logits perturbed with the rough noise of their tokens; at T = 0 the logits themselves.
SLIP_INLINE void rough_perturb(const float* logits, const int64_t* ids, int count, const Row& row, float* out) {
    if (!(row.temperature > 0.0f)) {
        std::memcpy(out, logits, sizeof(float) * static_cast<size_t>(count));
        return;
    }
    int64_t tokens[kLanes];
    uint32_t words[kLanes];
    float noise[kLanes];
    for (int i = 0; i < kLanes; ++i) tokens[i] = ids[i < count ? i : 0];
    words_of(tokens, row.position, row.seed, words);
    for (int i = 0; i < kLanes; ++i) noise[i] = rough_noise(words[i]);
    for (int i = 0; i < count; ++i) out[i] = logits[i] / row.temperature + noise[i];
}

// The k best of one row of perturbed logits, best first (equal ones by index), as log-probabilities among all of them.
// `perturbed` has space for a row. A draft only proposes, so the rough noise will do.
static void top_k_row(const float* logits, const int64_t* ids, int64_t vocab, const Row& row, int k, float* perturbed, float* scores, int64_t* entries) {
    for (int64_t at = 0; at < vocab; at += kLanes)
        rough_perturb(logits + at, ids + at, static_cast<int>(vocab - at < kLanes ? vocab - at : kLanes), row, perturbed + at);
    const float top = top_of(perturbed, 0, vocab);
    V sum = vzero();
    int64_t i = 0;
    for (; i + 16 <= vocab; i += 16) sum = vadd(sum, vexp(vsub(vload(perturbed + i), vset(top))));
    double total = vsum(sum);
    for (; i < vocab; ++i) total += std::exp(static_cast<double>(perturbed[i] - top));
    const float log_total = top + static_cast<float>(std::log(total));
    int found = 0;
    for (i = 0; i < vocab; ++i) {
        if (found == k && !(perturbed[i] > scores[k - 1])) continue;
        int at = found < k ? found++ : k - 1;
        for (; at > 0 && perturbed[i] > scores[at - 1]; --at) {
            scores[at] = scores[at - 1];
            entries[at] = entries[at - 1];
        }
        scores[at] = perturbed[i];
        entries[at] = i;
    }
    for (int j = 0; j < found; ++j) scores[j] -= log_total;
}

static void top_k(Pool& pool, Scratch& scratch, const TopK& shape, const float* logits, const int64_t* ids, const Sampling& s, float* scores, int64_t* entries) {
    if (shape.rows == 0 || shape.k == 0) return;
    float* perturbed = nullptr;
    const int64_t size = (shape.vocab + 15) / 16 * 16;
    for (int pass = 0; pass < 2; ++pass) {
        scratch.begin(pass == 1);
        perturbed = scratch.take<float>(size * pool.size());
    }
    pool.run(1, [&](Team& team) {
        team.share(static_cast<int>(shape.rows), 1, [&](int row, int) {
            const float* from = logits + row * shape.vocab;
            const Row view{from, s.temperature[row], s.seed[row], s.position[row]};
            top_k_row(from, ids, shape.vocab, view, shape.k, perturbed + size * team.id, scores + static_cast<int64_t>(row) * shape.k,
                      entries + static_cast<int64_t>(row) * shape.k);
        });
    });
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
