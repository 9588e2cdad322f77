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

// `scratch` serves the calls made from here, `own` what lives from level to level.
static void draft_chain(Pool& pool, Scratch& scratch, Scratch& own, const Stack& stack, const Draft& draft, const Chain& chain) {
    const int requests = chain.requests, width = stack.width, depth = chain.depth;
    const int64_t vocab = draft.ends.head.n;
    if (requests == 0 || depth == 0) return;
    Batch batch{};
    float *embedding = nullptr, *normed = nullptr, *logits = nullptr, *scores = nullptr;
    int32_t *starts = nullptr, *lengths = nullptr;
    int64_t *index = nullptr, *slots = nullptr, *causal = nullptr, *position = nullptr, *entries = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        own.begin(pass == 1);
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
    batch = {starts, lengths, chain.page_table, index, causal, slots, index, chain.page_table_stride, requests, requests, chain.page_size, 0};
    for (int64_t i = 0; i < static_cast<int64_t>(requests) * depth; ++i) {
        chain.scores[i] = -__builtin_inff();
        chain.entries[i] = 0;
    }
    for (int level = 0; level < depth; ++level) {
        for (int r = 0; r < requests; ++r) position[r] = chain.lengths[r] + 1 + level;  // of the token being guessed
        const Sampling sampling{chain.temperature, chain.seed, position};
        if (level > 0) {
            for (int r = 0; r < requests; ++r) {
                embed_token(draft.ends.embedding, draft.token_ids[entries[r]], width, embedding + static_cast<int64_t>(r) * width);
                index[r] = chain.lengths[r] + level - 1;
                slots[r] = static_cast<int64_t>(chain.page_table[r * chain.page_table_stride + index[r] / chain.page_size]) * chain.page_size +
                           index[r] % chain.page_size;
                causal[r] = -1;
                starts[r] = r;
                lengths[r] = static_cast<int32_t>(index[r] + 1);
            }
            starts[requests] = requests;
            run_layers(pool, scratch, stack, batch, chain.hidden, embedding);
            rms_norm(pool, chain.hidden, width, draft.ends.norm, normed, requests, width, draft.ends.eps);
            linear(pool, scratch, draft.ends.head, normed, width, requests, logits);
            if (draft.normed_feedback) copy_row(chain.hidden, normed, requests * width);
        }
        top_k(pool, scratch, {requests, vocab, 1, 0}, level > 0 ? logits : chain.root_logits, draft.token_ids, sampling, scores, entries);
        float worth = 0.0f;
        bool go_on = false;
        for (int r = 0; r < requests; ++r) {
            const int64_t at = static_cast<int64_t>(r) * depth + level;
            chain.scores[at] = (level > 0 ? chain.scores[at - 1] : 0.0f) + scores[r];
            chain.entries[at] = entries[r];
            if (chain.scores[at] < chain.floor) continue;
            go_on = true;
            worth += expf(chain.scores[at]) - expf(chain.floor);
        }
        if (!go_on || worth < chain.need) break;
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
