// The plain C structures that Python fills in and the kernels read; mirrored field by field in ../library.py.
#pragma once
#include <cstdint>

namespace slip {

enum Format : int32_t {
    F32 = 0,
    BF16 = 1,
    F16 = 2,
    Q4_1 = 3,
    Q4_0 = 4,
    Q8_0 = 5,
    W8A8 = 6,
    W4A8 = 7,
    Q4_K = 8,
    Q6_K = 9,
    Q5_0 = 10,
    Q5_1 = 11,
    Q5_K = 12,
    E4M3 = 13  // of keys and values alone
};

enum Isa : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

// A weight [n, k]. Dense formats are rows as stored; the others are panels of 16 rows (see panels.h). Rows that follow in
// another format, of those with a scale per block, are a weight of their own; n is then a multiple of 16.
struct Linear {
    const void* weight;
    const float* scale;  // one per row, for W8A8 and W4A8
    const float* bias;   // may be null
    const Linear* rest;  // the rows that follow; null where there are none
    int32_t format;
    int32_t n;
    int32_t k;
    int32_t reserved;
};

struct Layer {
    Linear qkv, o, gate_up, down;
    const float* input_norm;
    const float* hidden_norm;  // set for the first block of an EAGLE-3 draft, whose input is [embedding ; hidden]
    const float* post_norm;
    const float* q_norm;  // null without qk-norm
    const float* k_norm;
    const float* cos;  // [positions, rotary_half]
    const float* sin;
    float eps;
    float qk_eps;
    float scale;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t rotary_half;
    int32_t positions;
    int32_t window;  // 0: none
    int32_t normed_residual;
    int32_t intermediate;
    int32_t reserved;
};

// AttentionBatch, plus where each token's key goes and its rotary position.
struct Batch {
    const int32_t* query_starts;
    const int32_t* kv_lens;
    const int32_t* page_table;
    const int64_t* kv_index;
    const int64_t* ancestors;
    const int64_t* slots;
    const int64_t* positions;
    int64_t page_table_stride;
    int32_t requests;
    int32_t tokens;
    int32_t page_size;
    int32_t reserved;
};

// The keys and values of one layer, F32, BF16, F16 or E4M3: slot s, head g, value i at [s * slot_stride + g * head_dim + i].
// E4M3 has a power of two for each slot and head, 2^(scale - 127), scales [num_slots, kv_heads].
struct Kv {
    void* keys;
    void* values;
    uint8_t* key_scales;
    uint8_t* value_scales;
    int64_t slot_stride;
    int64_t num_slots;
    int32_t format;
    int32_t reserved;
};

struct Stack {
    const Layer* layers;
    const Kv* kv;
    const int32_t* captured;     // how many blocks come before each captured state
    float* const* captured_out;  // [tokens, width] each
    int32_t num_layers;
    int32_t num_captured;
    int32_t width;
    int32_t reserved;
};

struct Sampling {
    const float* temperature;
    const int64_t* seed;
    const int64_t* position;
};

// How a request's tokens are sampled: a record of ../../sampling.py's SamplingState.
struct Slot {
    int64_t seed, uses, top_k, min_until, num_top;
    double temperature, top_p, min_p, repetition, frequency, presence, unused;
};

struct SlotTable {
    const Slot* slots;
    int32_t* said;        // [slots, vocab]: 2 * (times emitted) + (is in the prompt)
    const float* bias;    // [slots, vocab]
    const int32_t* ends;  // [slots, end_words], a bit a token
    int64_t num_slots;
    int64_t vocab;
    int64_t end_words;
};

// Rows of logits to sample from.
struct SampleCall {
    SlotTable state;
    const int64_t* slot;
    const int64_t* position;  // of the token being chosen
    const int64_t* path;      // [rows, depth], drafted tokens on the way to a row; -1: none
    const int32_t* words;     // [masks, num_words], which tokens grammars leave
    const int64_t* mask_row;  // -1: none; null: nobody has one
    int64_t num_words;
    int64_t rows;
    int64_t depth;
};

constexpr int kMaxTop = 20;

struct SampleOut {
    int64_t* tokens;
    float* logprob;
    int64_t* top_ids;     // [rows, kMaxTop]
    float* top_logprobs;  // [rows, kMaxTop]
};

// A table of embeddings [rows, width]: dense rows, or panels of a GGUF format.
struct Embedding {
    const void* rows;
    int32_t format;
    int32_t reserved;
};

// What a model has around its blocks.
struct Ends {
    Linear head;
    Embedding embedding;
    const float* norm;
    float eps;
    int32_t reserved;
};

enum FuseNorm : int32_t { NO_NORM = 0, NORM_EACH = 1, NORM_JOINED = 2 };

// What an EAGLE-3 draft has beside its blocks.
struct Draft {
    Ends ends;
    Linear fuse;              // of the target's captured states, side by side
    const float* fuse_norms;  // as many weights as the captured states have values
    const int64_t* token_ids;  // of the head's entries
    float fuse_eps;
    int32_t fuse_norm;
    int32_t normed_feedback;  // the next level is fed what the head reads, not the stream before the norm
    int32_t reserved;
};

// Tokens of a request's own text that the draft does not know, with rows of its head for them.
struct Borrowed {
    const int64_t* tokens;
    const float* rows;  // [count, width]
    int32_t count;
    float bonus;  // added to their logits
};

// Chains of `depth` tokens to draft for some requests. A level's keys go to the slots from `lengths` on.
struct Chain {
    const int32_t* page_table;
    const int64_t* lengths;
    const float* temperature;
    const int64_t* seed;
    const float* root_logits;  // [requests, head.n]: they foretell the first level
    float* hidden;             // [requests, width], what the first level is fed; overwritten
    const Borrowed* borrowed;  // [requests]; null: nobody has any
    void* const* texts;        // [requests], a Text each that goes on beside the chain, or null; null: nobody has one
    float* scores;             // [requests, depth], cumulative log-probability; -inf for what was not drafted
    int64_t* tokens;           // [requests, depth]
    int64_t page_table_stride;
    int32_t requests;
    int32_t page_size;
    int32_t depth;
    float floor;  // of the cumulative log-probability, below which a token is not checked
    float need;   // what the chains' chances above the floor's must add up to for another level
    double trust;  // a token's chance is its probability to this power, where no text says more
};

// The models of a round; without a draft, both of its parts are null.
struct RoundModels {
    const Stack* target;  // `captured_out` is ignored: a round keeps the states to itself
    const Ends* ends;
    const Stack* draft_blocks;
    const Draft* draft;
};

// Rounds of decoding: each request's last known token, the root, is computed with the tokens drafted after it, and so on
// from what came of it, until an answer ends or there is no space or no patience for another round.
struct Rounds {
    const int32_t* page_table;
    const int64_t* slots;    // tokens each request's pages hold
    const int64_t* roots;
    const int64_t* lengths;  // keys before the root
    const int64_t* wanted;   // tokens it may still emit
    const int64_t* ends;     // tokens that end answers, request after request
    const int32_t* end_starts;  // [requests + 1], into `ends`
    const int32_t* hurry;    // end with the round under way once it is not 0; null: nobody asks
    SlotTable sampling;      // what is emitted is added to what slots with penalties have said
    const int64_t* sampling_slots;
    // Writes the masks of a round, counted from 0, to `words` and each node's to `mask_rows`, once what is drafted lies in
    // `drafted`, where it may put other nodes, as many as there is `room` for; anything but 0 ends the call before this
    // round. Null: nobody has a grammar.
    int32_t (*fill_masks)(int32_t round);
    int32_t* words;          // [masks, num_words]
    int64_t* mask_rows;      // [requests, nodes + 1]; -1: none
    int64_t masks;
    int64_t num_words;
    const int32_t* limits;   // tokens to draft at most, up to `depth`
    const Borrowed* borrowed;  // [requests]; null: nobody has any
    float* const* feedback;  // what the draft left at the request's last slot, replaced; null: it does not follow
    float* const* late_states;     // captured states of tokens the draft has not followed yet, [capacity, states, width]
    int64_t* const* late_tokens;   // and the token after each
    int32_t* late;                 // how many, replaced
    void* const* texts;      // [requests], a Text each, with the root; what is emitted is added. Null: nobody copies
    const int32_t* copies;   // [requests], copied nodes beside a chain at most
    const int32_t* room;     // [requests], nodes that `fill_masks` may put there at most
    const int32_t* depths;   // [requests], nodes of a path at most; the call works them out
    float* scores;           // [rounds, requests, depth], cumulative log-probability; -inf for tokens not drafted
    int64_t* drafted;        // [rounds, requests, nodes], what came before the target: a chain, then what was copied or forced
    int32_t* parents;        // [rounds, requests, nodes]: node n's, n from 1, lies at n - 1; 0 is the root
    int32_t* guessed;        // [rounds, requests], nodes of the chain
    int32_t* checked;        // [rounds, requests], nodes
    int32_t* kept;           // [rounds, requests], and those of them it agreed to; -1: not even the root has a token
    int32_t* foretold;       // [rounds, requests], and those of them that copying alone would have had
    int64_t* emitted;        // [rounds, requests, nodes + 1]: those, and the target's own
    SampleOut scored;        // of the emitted tokens, [rounds, requests, nodes + 1]; `tokens` is not used
    double* seconds;         // [rounds, 3]: for drafting, for checking, for following
    int32_t* ran;            // how many rounds there were
    double patience;         // seconds after which no other round is begun, by what the last one took
    int64_t page_table_stride;
    int32_t requests;
    int32_t page_size;
    int32_t depth;
    int32_t nodes;     // of a tree, without its root: a chain's and copied ones, or what there is room for
    float floor;       // as for a chain
    float need;
    double trust;
    double least;      // chance of being kept, below which a token is not copied
    double row;        // what a row is worth in tokens once there are many
    int32_t follow;    // let the draft follow at once, not when it next drafts
    int32_t capacity;  // of `late_states`
    int32_t rounds;    // at most
};

// How many tokens a request may have drafted in a round, whose chain has `limit` at most.
inline int32_t drafted_most(const Rounds& r, int request, int32_t limit) {
    const int32_t most = limit + (r.texts ? r.copies[request] : 0);
    return most > r.room[request] ? most : r.room[request];
}

}  // namespace slip
