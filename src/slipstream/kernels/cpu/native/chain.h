// A chain of drafted tokens as one call: embed, run the draft's blocks, norm, head, best token, level after level.
#pragma once
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

// The chains that go on, in order: a chain that fell below the floor is not drafted further, and its row goes to the next.
struct ChainRows {
    int32_t *who, *page_table;
    float *hidden, *temperature;
    int64_t *lengths, *seed;
    int count;

    void take(Scratch& room, const Chain& chain) {
        who = room.take<int32_t>(chain.requests);
        page_table = room.take<int32_t>(chain.requests * chain.page_table_stride);
        temperature = room.take<float>(chain.requests);
        lengths = room.take<int64_t>(chain.requests);
        seed = room.take<int64_t>(chain.requests);
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

// `scratch` serves the calls made from here, `own` what lives from level to level.
static void draft_chain(Pool& pool, Scratch& scratch, Scratch& own, const Stack& stack, const Draft& draft, const Chain& chain) {
    const int requests = chain.requests, width = stack.width, depth = chain.depth;
    const int64_t vocab = draft.ends.head.n, stride = chain.page_table_stride;
    if (requests == 0 || depth == 0) return;
    ChainRows rows{};
    float *embedding = nullptr, *normed = nullptr, *logits = nullptr, *scores = nullptr;
    int32_t *starts = nullptr, *lengths = nullptr;
    int64_t *index = nullptr, *slots = nullptr, *causal = nullptr, *position = nullptr, *entries = nullptr;
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
        entries = own.take<int64_t>(requests);
    }
    rows.start(chain);
    for (int64_t i = 0; i < static_cast<int64_t>(requests) * depth; ++i) {
        chain.scores[i] = -__builtin_inff();
        chain.entries[i] = 0;
    }
    for (int level = 0; level < depth; ++level) {
        const int count = rows.count;
        for (int r = 0; r < count; ++r) position[r] = rows.lengths[r] + 1 + level;  // of the token being guessed
        if (level > 0) {
            for (int r = 0; r < count; ++r) {
                embed_token(draft.ends.embedding, draft.token_ids[entries[r]], width, embedding + static_cast<int64_t>(r) * width);
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
        }
        const Sampling sampling{rows.temperature, rows.seed, position};
        top_k(pool, scratch, {count, vocab, 1, 0}, level > 0 ? logits : chain.root_logits, draft.token_ids, sampling, scores, entries);
        float worth = 0.0f;
        rows.count = 0;
        for (int r = 0; r < count; ++r) {
            const int64_t at = static_cast<int64_t>(rows.who[r]) * depth + level;
            chain.scores[at] = (level > 0 ? chain.scores[at - 1] : 0.0f) + scores[r];
            chain.entries[at] = entries[r];
            if (chain.scores[at] < chain.floor) continue;
            worth += expf(chain.scores[at]) - expf(chain.floor);
            entries[rows.count] = entries[r];
            rows.move(r, rows.count++, stride, width);
        }
        if (rows.count == 0 || worth < chain.need) break;
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
