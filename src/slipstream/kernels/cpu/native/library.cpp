// The C interface: an engine (threads, scratch memory, the kernels of one instruction set) and calls on it.
#include <algorithm>
#include <cfenv>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>

#include "copies.h"
#include "abi.h"
#include "pool.h"
#include "repack.h"
#include "scratch.h"
#include "table.h"

#define SLIP_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace slip;

struct Engine {
    Engine(int threads, const Table& functions) : pool(threads), table(functions) {}
    Pool pool;
    Workspaces workspaces;
    const Table& table;
    std::recursive_mutex calls;  // share the workspaces; one that makes masks may come back
};

// Rounding and denormals as the kernels count on them, whatever the caller has set; the workers have no others.
struct PlainFloats {
    PlainFloats() {
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);
    }
    ~PlainFloats() { std::fesetenv(&before); }
    std::fenv_t before;
};

const Table& table_of(int isa) {
#if defined(__x86_64__)
    if (isa == AVX512) return avx512::table();
    if (isa == AVX2) return avx2::table();
#endif
    (void)isa;
    return portable::table();
}

// Tell whether every index a batch holds lies inside what it points into.
bool valid(const Batch& b, const Kv& kv, bool writes, int64_t positions) {
    if (b.tokens < 0 || b.requests < 0 || b.page_size < 1) return false;
    if (b.requests > 0 && (b.query_starts[0] != 0 || b.query_starts[b.requests] != b.tokens)) return false;
    if (b.requests == 0 && b.tokens > 0) return false;
    for (int r = 0; r < b.requests; ++r) {
        if (b.query_starts[r + 1] < b.query_starts[r] || b.kv_lens[r] < 0) return false;
        const int64_t pages = (static_cast<int64_t>(b.kv_lens[r]) + b.page_size - 1) / b.page_size;
        if (pages > b.page_table_stride) return false;
        for (int64_t i = 0; i < pages; ++i) {
            const int64_t page = b.page_table[r * b.page_table_stride + i];
            const int64_t last = std::min<int64_t>(b.page_size, b.kv_lens[r] - i * b.page_size) - 1;
            if (page < 0 || page * b.page_size + last >= kv.num_slots) return false;
        }
        for (int t = b.query_starts[r]; t < b.query_starts[r + 1]; ++t) {
            if (b.kv_index[t] < 0 || b.kv_index[t] >= b.kv_lens[r]) return false;
            if (writes && (b.slots[t] < 0 || b.slots[t] >= kv.num_slots)) return false;
            if (writes && (b.positions[t] < 0 || b.positions[t] >= positions)) return false;
        }
    }
    return true;
}

// Tell whether keys up to `keys` of a request lie inside its pages, the slots of every layer and the rotary table.
bool fits(const int32_t* pages, int64_t stride, int page_size, int64_t keys, const Stack& stack) {
    const int64_t count = (keys + page_size - 1) / page_size;
    if (count > stride) return false;
    for (int32_t layer = 0; layer < stack.num_layers; ++layer) {
        if (keys > stack.layers[layer].positions) return false;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t last = std::min<int64_t>(page_size, keys - i * page_size) - 1;
            if (pages[i] < 0 || pages[i] * static_cast<int64_t>(page_size) + last >= stack.kv[layer].num_slots) return false;
        }
    }
    return true;
}

// Tell whether what requests have borrowed can be looked up in a table of embeddings of `vocab` rows.
bool valid(const Borrowed* borrowed, int requests, int64_t vocab) {
    for (int r = 0; borrowed && r < requests; ++r)
        for (int i = 0; i < borrowed[r].count; ++i)
            if (borrowed[r].tokens[i] < 0 || borrowed[r].tokens[i] >= vocab) return false;
    return true;
}

// Tell whether a chain's levels stay inside pages, slots and positions. (That a draft's own tokens lie inside the table of
// embeddings is checked once, where it is described.)
bool valid(const Chain& c, const Stack& stack, int64_t vocab) {
    if (c.requests < 0 || c.page_size < 1 || c.depth < 0 || !valid(c.borrowed, c.requests, vocab)) return false;
    for (int r = 0; r < c.requests; ++r) {
        if (c.lengths[r] < 0) return false;
        const int64_t keys = c.lengths[r] + (c.depth > 0 ? c.depth - 1 : 0);
        if (!fits(c.page_table + r * c.page_table_stride, c.page_table_stride, c.page_size, keys, stack)) return false;
    }
    return true;
}

// Tell whether rows to sample from name slots and masks there are.
bool valid(const SampleCall& call, int64_t num_masks) {
    for (int64_t row = 0; row < call.rows; ++row) {
        if (call.slot[row] < 0 || call.slot[row] >= call.state.num_slots) return false;
        if (call.mask_row && call.mask_row[row] >= num_masks) return false;
    }
    return true;
}

// The first round is looked at here; before each further one the call looks at what has changed.
bool valid(const Rounds& r, const RoundModels& m, int64_t vocab) {
    if (r.sampling.vocab != m.ends->head.n) return false;
    for (int i = 0; i < r.requests; ++i)
        if (r.sampling_slots[i] < 0 || r.sampling_slots[i] >= r.sampling.num_slots) return false;
    if (r.requests < 0 || r.page_size < 1 || r.depth < 0 || r.rounds < 1 || !valid(r.borrowed, r.requests, vocab)) return false;
    for (int i = 0; i < r.requests; ++i) {
        if (r.lengths[i] < 0 || r.roots[i] < 0 || r.roots[i] >= vocab || r.limits[i] < 0 || r.limits[i] > r.depth) return false;
        if (r.limits[i] > 0 && (!m.draft || !r.feedback[i])) return false;
        const bool follows = m.draft && r.feedback[i];
        const int32_t most = drafted_most(r, i, r.limits[i]);
        if (most < r.limits[i] || most > r.nodes || r.nodes >= kMaxNodes) return false;
        if (follows && (r.late[i] < 0 || r.late[i] > r.lengths[i] || r.late[i] + 1 + most > r.capacity)) return false;
        const int32_t* pages = r.page_table + i * r.page_table_stride;
        const int64_t keys = r.lengths[i] + 1 + most;
        for (const Stack* stack : {m.target, follows ? m.draft_blocks : m.target}) {
            const int64_t most = std::min<int64_t>(r.slots[i], stack->layers->positions);
            if (keys > most || !fits(pages, r.page_table_stride, r.page_size, most, *stack)) return false;
        }
    }
    return true;
}

}  // namespace

// Raised whenever a structure or a function's arguments change; Python refuses a library of another number.
SLIP_EXPORT int32_t slip_abi() { return 16; }

SLIP_EXPORT int32_t slip_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return AVX512;
    if (avx2) return AVX2;
#endif
    return PORTABLE;
}

// Null when threads or memory cannot be had.
SLIP_EXPORT void* slip_engine_create(int32_t threads, int32_t isa) {
    try {
        return new Engine(threads, table_of(isa));
    } catch (const std::exception&) {
        return nullptr;
    }
}

SLIP_EXPORT void slip_engine_destroy(void* engine) {
    if (!static_cast<Engine*>(engine)->pool.forked()) delete static_cast<Engine*>(engine);
}

// The calls below return 0, 1 when memory ran out, 2 when a batch points outside its pages, slots or positions, 3 when query
// heads cannot be shared out over key heads.
#define SLIP_CALL(body)                                \
    auto& e = *static_cast<Engine*>(engine);           \
    const PlainFloats floats;                          \
    try {                                              \
        const std::lock_guard lock(e.calls);           \
        body;                                          \
        return 0;                                      \
    } catch (const std::out_of_range&) {               \
        return 2;                                      \
    } catch (const std::exception&) {                  \
        return 1;                                      \
    }

SLIP_EXPORT int32_t slip_linear(void* engine, const Linear* w, const float* x, int64_t stride, int32_t rows, float* y) {
    SLIP_CALL(e.table.linear(e.pool, e.workspaces.call, *w, x, stride, rows, y))
}

SLIP_EXPORT int32_t slip_attention(void* engine, const Batch* batch, const Kv* kv, const AttentionShape* shape, const float* q, float* out) {
    const bool grouped = shape->kv_heads > 0 && shape->heads % shape->kv_heads == 0 && shape->heads / shape->kv_heads <= kMaxGroup;
    if (!grouped) return 3;
    if (!valid(*batch, *kv, false, 0)) return 2;
    SLIP_CALL(e.table.attention(e.pool, e.workspaces.call, *batch, *kv, *shape, q, out))
}

SLIP_EXPORT int32_t slip_run_layers(void* engine, const Stack* stack, const Batch* batch, float* hidden, const float* embedding) {
    for (int32_t i = 0; i < stack->num_layers; ++i)
        if (!valid(*batch, stack->kv[i], true, stack->layers[i].positions)) return 2;
    SLIP_CALL(e.table.run_layers(e.pool, e.workspaces.call, *stack, *batch, hidden, embedding))
}

SLIP_EXPORT int32_t slip_rms_norm(void* engine, const float* x, int64_t stride, const float* weight, float* y, int64_t rows, int32_t width, float eps) {
    SLIP_CALL(e.table.rms_norm(e.pool, x, stride, weight, y, rows, width, eps))
}

SLIP_EXPORT int32_t slip_silu_mul(void* engine, const float* x, int64_t stride, float* y, int64_t rows, int32_t width) {
    SLIP_CALL(e.table.silu_mul(e.pool, x, stride, y, rows, width))
}

SLIP_EXPORT int32_t slip_rotate(void* engine, const Rotation* rotation, const float* x, float* y) {
    SLIP_CALL(e.table.rotate(e.pool, *rotation, x, y))
}

// The logits may be overwritten.
SLIP_EXPORT int32_t slip_sample(void* engine, const SampleCall* call, int64_t num_masks, float* logits, const SampleOut* out) {
    if (!valid(*call, num_masks)) return 2;
    SLIP_CALL(e.table.sample(e.pool, e.workspaces.call, *call, logits, *out))
}

SLIP_EXPORT int32_t slip_perturb(void* engine, const float* logits, const int64_t* ids, int64_t rows, int64_t vocab, const Sampling* sampling, float* out) {
    SLIP_CALL(e.table.perturb(e.pool, logits, ids, rows, vocab, *sampling, out))
}

SLIP_EXPORT int32_t slip_top_k(void* engine, const TopK* shape, const float* logits, const int64_t* ids, const Sampling* sampling, float* scores, int64_t* entries) {
    SLIP_CALL(e.table.top_k(e.pool, e.workspaces.call, *shape, logits, ids, *sampling, scores, entries))
}

// `vocab` is the number of rows of the draft's table of embeddings.
SLIP_EXPORT int32_t slip_draft_chain(void* engine, const Stack* stack, const Draft* draft, const Chain* chain, int64_t vocab) {
    if (!valid(*chain, *stack, vocab)) return 2;
    SLIP_CALL(e.table.draft_chain(e.pool, e.workspaces.call, e.workspaces.chain, *stack, *draft, *chain))
}

// `vocab` is the number of rows of the target's table of embeddings, and no less than its head's.
SLIP_EXPORT int32_t slip_rounds(void* engine, const RoundModels* models, const Rounds* rounds, int64_t vocab) {
    if (!valid(*rounds, *models, vocab)) return 2;
    SLIP_CALL(e.table.run_rounds(e.pool, e.workspaces, *models, *rounds))
}

// A text to copy from; null when memory cannot be had.
SLIP_EXPORT void* slip_text_create(const double* prior) {
    try {
        return new Text(prior);
    } catch (const std::exception&) {
        return nullptr;
    }
}

SLIP_EXPORT void slip_text_destroy(void* text) { delete static_cast<Text*>(text); }

SLIP_EXPORT int64_t slip_text_size(const void* text) { return static_cast<const Text*>(text)->size(); }

// 1 when memory ran out or the text is too long; it may then have taken in a part.
SLIP_EXPORT int32_t slip_text_extend(void* text, const int64_t* tokens, int64_t count, int32_t learns) {
    try {
        static_cast<Text*>(text)->extend(tokens, count, learns != 0);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

// How often guesses were tried and right, by class of match: [2, kMatchClasses].
SLIP_EXPORT void slip_text_learned(const void* text, double* out) {
    const Text& from = *static_cast<const Text*>(text);
    for (int i = 0; i < kMatchClasses; ++i) {
        out[i] = from.tried()[i];
        out[kMatchClasses + i] = from.right()[i];
    }
}

// What would be copied after a path of tokens that follow the text: tokens and cumulative chances, at most `most` of them
// and none below `least`; returns how many.
SLIP_EXPORT int32_t slip_text_copy(const void* text, const int64_t* path, int32_t depth, int32_t most, double least, int64_t* tokens, double* chances) {
    return copy_run(*static_cast<const Text*>(text), path, depth, most, least, tokens, chances);
}

SLIP_EXPORT int32_t slip_write_slots(float* to, int64_t to_stride, int64_t num_slots, const float* from, int64_t from_stride, const int64_t* slots, int64_t tokens, int64_t width) {
    for (int64_t t = 0; t < tokens; ++t)
        if (slots[t] < 0 || slots[t] >= num_slots) return 2;
    for (int64_t t = 0; t < tokens; ++t) std::memcpy(to + slots[t] * to_stride, from + t * from_stride, sizeof(float) * static_cast<size_t>(width));
    return 0;
}

SLIP_EXPORT int64_t slip_panel_bytes(int32_t format, int64_t n, int64_t k) { return (n + 15) / 16 * repacked_panel_bytes(format, k); }

SLIP_EXPORT int32_t slip_repack(void* engine, int32_t format, const uint8_t* rows, int64_t row_bytes, int64_t n, int64_t k, uint8_t* out) {
    auto& e = *static_cast<Engine*>(engine);
    const int panels = static_cast<int>((n + 15) / 16);
    e.pool.run(1, [&](Team& team) {
        team.share(panels, 8, [&](int begin, int end) { repack_panels(format, {rows, row_bytes, n, k}, begin, end, out); });
    });
    return 0;
}

// Rows of a repacked weight as floats; those with a scale per row still want it.
SLIP_EXPORT int32_t slip_gather_rows(int32_t format, const uint8_t* panels, int64_t n, int64_t k, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= n) return 2;
    const PlainFloats floats;
    for (int64_t i = 0; i < count; ++i) unpack_row(format, panels, ids[i], k, out + i * k);
    return 0;
}
