// What a batch means for attention, worked out once for all layers: which keys a token sees, and blocks of queries.
#pragma once
#include "abi.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kBlockRows = 96;  // of queries that keys are transposed for
constexpr int kFewRows = 24;    // for which all key heads are attended together; see attend_block

struct TokenView {
    const int64_t* slots;  // of its request's keys, by index
    const int64_t* tail;   // of its visible keys from rank `tail_start`
    uint64_t bits;
    int32_t index;
    int32_t tail_start;
    int32_t regular;  // below this rank, rank and index are the same
    int32_t count;    // visible keys, whatever the window

    int64_t slot(int rank) const { return rank < tail_start ? slots[rank] : tail[rank - tail_start]; }
    int64_t slot_up_to_last(int rank) const { return slot(rank < count ? rank : count - 1); }
    // A window shows the last keys, so many; a chunk those from its own start on. Both count positions, which ranks are.
    int first_rank(int window, int chunk) const {
        const int first = window > 0 ? count - window : chunk > 0 ? (count - 1) / chunk * chunk : 0;
        return first > 0 ? first : 0;
    }
};

struct QueryBlock {
    int32_t first;
    int32_t tokens;
    int32_t shared;  // below this rank all its tokens see the same keys
    int32_t last;    // no token sees a key of this rank
};

// What a batch means for attention, worked out once for all layers.
struct Plan {
    TokenView* tokens;
    QueryBlock* blocks;
    int num_blocks;
    int max_rows;
    int padded_keys;
    int group;  // query heads that share a key head
};

struct PlanSize {
    int64_t keys, tokens, blocks;
    int block_tokens;
    bool together;  // the team shares each block of queries; otherwise a member takes a block from start to end
};

SLIP_INLINE int64_t count_blocks(const Batch& batch, int block_tokens) {
    int64_t blocks = 0;
    for (int r = 0; r < batch.requests; ++r) blocks += (batch.query_starts[r + 1] - batch.query_starts[r] + block_tokens - 1) / block_tokens;
    return blocks;
}

// With too few blocks for the team, each request's tokens are cut into as many parts as there are members: keys are then
// transposed by each of them, but scores never leave the member that computed them, and nobody waits before a softmax.
// Where that would leave a member less than two tokens, the team shares blocks instead.
static PlanSize plan_size(const Batch& batch, int group, int team) {
    PlanSize size{0, batch.tokens, 0, kBlockRows / group > 0 ? kBlockRows / group : 1, false};
    int longest = 0;
    for (int r = 0; r < batch.requests; ++r) {
        const int tokens = batch.query_starts[r + 1] - batch.query_starts[r];
        longest = tokens > longest ? tokens : longest;
        size.keys += batch.kv_lens[r];
    }
    size.blocks = count_blocks(batch, size.block_tokens);
    if (team == 1 || size.blocks >= 2 * team) return size;
    const int part = (longest + team - 1) / team;
    size.together = longest < 2 * team;
    if (size.together || part >= size.block_tokens) return size;
    size.block_tokens = part;
    size.blocks = count_blocks(batch, part);
    return size;
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

static Plan make_plan(const Batch& batch, int group, int block_tokens, int64_t* slots, int64_t* tails, TokenView* views, QueryBlock* blocks) {
    Plan plan{views, blocks, 0, 0, 16, group};
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
        for (int t = begin; t < end; t += block_tokens) {
            const int tokens = end - t < block_tokens ? end - t : block_tokens;
            QueryBlock block{t, tokens, views[t].regular, 0};
            for (int i = t; i < t + tokens; ++i) {
                block.shared = views[i].regular < block.shared ? views[i].regular : block.shared;
                block.last = views[i].count > block.last ? views[i].count : block.last;
            }
            plan.blocks[plan.num_blocks++] = block;
            if (tokens * group > plan.max_rows) plan.max_rows = tokens * group;
        }
        slots += batch.kv_lens[r];
    }
    return plan;
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
