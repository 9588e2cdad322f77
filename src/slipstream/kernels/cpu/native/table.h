// The functions an instruction set offers; library.cpp picks a table once.
#pragma once
#include "abi.h"
#include "pool.h"
#include "scratch.h"

namespace slip {

constexpr int kMaxGroup = 256;  // query heads that may share a key head

struct AttentionShape {
    const float* sinks;  // a score of each query head that stands for no key, or null
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t window;
    float scale;
    int32_t chunk;
};

struct Rotation {
    const float* cos;
    const float* sin;
    int64_t stride;  // floats from a token of x to the next
    int64_t tokens;
    int32_t heads;
    int32_t head_dim;
    int32_t half;
    int32_t reserved;
};

struct TopK {
    int64_t rows;
    int64_t vocab;
    int32_t k;
    int32_t reserved;
};

struct Table {
    void (*linear)(Pool&, Scratch&, const Linear&, const float* x, int64_t stride, int rows, float* y);
    void (*attention)(Pool&, Scratch&, const Batch&, const Kv&, const AttentionShape&, const float* q, float* out);
    void (*run_layers)(Pool&, Scratch&, const Stack&, const Batch&, float* hidden, const float* embedding);
    void (*rms_norm)(Pool&, const float* x, int64_t stride, const float* weight, float* y, int64_t rows, int width, float eps);
    void (*silu_mul)(Pool&, const float* x, int64_t stride, float* y, int64_t rows, int width);
    void (*rotate)(Pool&, const Rotation&, const float* x, float* y);
    void (*sample)(Pool&, Scratch&, const SampleCall&, float* logits, const SampleOut&);
    void (*perturb)(Pool&, const float* logits, const int64_t* ids, int64_t rows, int64_t vocab, const Sampling&, float* out);
    void (*top_k)(Pool&, Scratch&, const TopK&, const float* logits, const int64_t* ids, const Sampling&, float* scores, int64_t* entries);
    void (*draft_chain)(Pool&, Scratch& scratch, Scratch& own, const Stack&, const Draft&, const Chain&);
    void (*run_rounds)(Pool&, Workspaces&, const RoundModels&, const Rounds&);
};

namespace portable {
const Table& table();
}
namespace avx2 {
const Table& table();
}
namespace avx512 {
const Table& table();
}

}  // namespace slip
