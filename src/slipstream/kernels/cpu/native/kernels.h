// Everything compiled once per instruction set; defines the table of that set. Include with SLIP_ISA, SLIP_NAMESPACE set.
#include "attention.h"
#include "layers.h"
#include "panels.h"
#include "pointwise.h"
#include "sampling.h"
#include "table.h"

namespace slip {
namespace SLIP_NAMESPACE {

static void linear(Pool& pool, Scratch& scratch, const Linear& w, const float* x, int64_t stride, int rows, float* y) {
    if (rows == 0 || w.n == 0) return;
    char* codes = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        scratch.begin(pass == 1);
        codes = scratch.take<char>(is_dense(w.format) ? 0 : activation_bytes(rows, w));
    }
    const Activations a = activations(w, x, stride, rows, codes);
    const Output out{y, w.n, false};
    const int panels = num_panels(w);
    pool.run(2, [&](Team& team) {
        if (!is_dense(w.format)) {
            team.share(rows, 4, [&](int begin, int end) { prepare_rows(w, a, begin, end); });
        }
        team.share(panels, piece_size(panels, team.size, rows), [&](int begin, int end) { product(w, a, rows, begin, end, out); });
    });
}

static void attention(Pool& pool, Scratch& scratch, const Batch& batch, const Kv& kv, const AttentionShape& shape, const float* q, float* out) {
    if (batch.tokens == 0) return;
    const int group = shape.heads / shape.kv_heads, team = pool.size();
    const int64_t width = static_cast<int64_t>(shape.heads) * shape.head_dim;
    const PlanSize size = plan_size(batch, group, team);
    int longest = 0;
    for (int r = 0; r < batch.requests; ++r) longest = batch.kv_lens[r] > longest ? batch.kv_lens[r] : longest;
    const AttentionSize need = attention_size(size, group, (longest + 31) / 16 * 16, shape.kv_heads, shape.head_dim, team);
    AttentionArgs args{};
    float *scaled = nullptr, *transposed = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        scratch.begin(pass == 1);
        int64_t* slots = scratch.take<int64_t>(size.keys + 1);
        int64_t* tails = scratch.take<int64_t>(64 * size.tokens);
        TokenView* views = scratch.take<TokenView>(size.tokens);
        QueryBlock* blocks = scratch.take<QueryBlock>(size.blocks + 1);
        scaled = scratch.take<float>(width * batch.tokens);
        float* scores = scratch.take<float>(need.scores);
        float* inverse = scratch.take<float>(need.inverse);
        transposed = scratch.take<float>(need.transposed);
        if (pass == 0) continue;
        args = {make_plan(batch, group, size.block_tokens, slots, tails, views, blocks), kv, scaled, out, width, width,
                shape.heads, shape.kv_heads, shape.head_dim, shape.window, scores, inverse, nullptr, {}, shape.sinks, shape.chunk};
    }
    for (int64_t i = 0; i < width * batch.tokens; ++i) scaled[i] = q[i] * shape.scale;
    pool.run(3, [&](Team& members) { attend(args, size.together, transposed, members); });
}

template <class Body>
static void over_rows(Pool& pool, int64_t rows, int64_t width, Body body) {
    if (rows * width < 16384) {  // waking a thread costs more
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    const int piece = static_cast<int>(8192 / (width + 1) + 1);
    pool.run(1, [&](Team& team) {
        team.share(static_cast<int>(rows), piece, [&](int begin, int end) {
            for (int row = begin; row < end; ++row) body(row);
        });
    });
}

static void rms_norm(Pool& pool, const float* x, int64_t stride, const float* weight, float* y, int64_t rows, int width, float eps) {
    over_rows(pool, rows, width, [&](int64_t row) { rms_norm_row(x + row * stride, weight, y + row * width, width, eps); });
}

static void silu_mul(Pool& pool, const float* x, int64_t stride, float* y, int64_t rows, int width) {
    over_rows(pool, rows, width, [&](int64_t row) { silu_mul_span(x + row * stride, x + row * stride + width, y + row * width, width); });
}

static void rotate(Pool& pool, const Rotation& r, const float* x, float* y) {
    over_rows(pool, r.tokens, static_cast<int64_t>(r.heads) * r.head_dim, [&](int64_t row) {
        for (int head = 0; head < r.heads; ++head)
            rotate_head(x + row * r.stride + head * r.head_dim, r.cos + row * r.half, r.sin + row * r.half,
                        y + (row * r.heads + head) * r.head_dim, r.half, r.head_dim);
    });
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip

#include "chain.h"
#include "round.h"

namespace slip {
namespace SLIP_NAMESPACE {

const Table& table() {
    static const Table functions{linear, attention, run_layers, rms_norm, silu_mul, rotate, sample, perturb, top_k, draft_chain, run_rounds};
    return functions;
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
