// Copied tokens beside a drafted chain: after every node of it the text may go on as it did before, and the likeliest of
// those tokens are checked too. ../../../speculation/merge.py is the same for any tree.
#pragma once
#include <cmath>

#include "text.h"

namespace slip {

constexpr int kMaxNodes = 64;  // of a tree, its root included

// A request's drafted nodes, numbered from 1; the first are the draft's chain. At most kMaxNodes - 1.
struct Nodes {
    int64_t* tokens;
    int32_t* parents;
    int count;

    int child(int parent, int64_t token) const {
        for (int i = 0; i < count; ++i)
            if (parents[i] == parent && tokens[i] == token) return i + 1;
        return -1;
    }
};

struct CopyLimits {
    int nodes;  // that may be added
    int depth;  // of a path
    double least;  // chance of being kept
};

// What goes on after one node: `next` has the chance `chance`, and follows `path` after the text.
struct Copying {
    Match match;
    int64_t step, next;
    double chance;
    int node, depth;
    int64_t path[kMaxNodes];

    void foresee(const Text& text) {
        next = depth < kMaxNodes - 1 ? text.follower(match, step, path, depth) : -1;
        if (next >= 0) chance *= text.chance(match.length + step);
    }

    void advance(const Text& text, int to) {
        path[depth++] = next;
        node = to;
        ++step;
        foresee(text);
    }
};

// One run after a path of tokens that follow the text; the path and what is copied fit in a tree.
inline int copy_run(const Text& text, const int64_t* path, int depth, int most, double least, int64_t* tokens, double* chances) {
    Copying run{text.ending(), 0, -1, 1.0, 0, depth, {}};
    if (depth >= kMaxNodes) return 0;
    for (int i = 0; i < depth; ++i) {
        run.path[i] = path[i];
        run.match = text.then(run.match, path[i]);
    }
    run.foresee(text);
    int count = 0;
    for (; count < most && run.next >= 0 && run.chance >= least; run.advance(text, 0)) {
        tokens[count] = run.next;
        chances[count++] = run.chance;
    }
    return count;
}

// The chance that the token copied after the text's own ending is right; 0 without one.
inline double first_chance(const Text& text) {
    const Match match = text.ending();
    return text.follower(match, 0, nullptr, 0) < 0 ? 0.0 : text.chance(match.length);
}

// Add copied nodes, the likeliest first. `scores` are the chain's cumulative log-probabilities; `own` is given the nodes that
// copying alone would have checked, in order, and their number is returned.
inline int add_copies(const Text& text, const CopyLimits& limits, const float* scores, Nodes& nodes, int* own) {
    const int chain = nodes.count;
    Copying runs[kMaxNodes];
    Match match = text.ending();
    for (int node = 0; node <= chain; ++node) {
        Copying& run = runs[node];
        if (node) match = text.then(match, nodes.tokens[node - 1]);
        run.match = match;
        run.step = 0;
        run.node = run.depth = node;
        run.chance = node ? std::exp(static_cast<double>(scores[node - 1])) : 1.0;
        for (int i = 0; i < node; ++i) run.path[i] = nodes.tokens[i];
        run.foresee(text);
    }
    int num_own = 0;
    for (;;) {
        Copying* best = nullptr;
        for (int i = 0; i <= chain; ++i)
            if (runs[i].next >= 0 && runs[i].depth < limits.depth && runs[i].chance >= limits.least && (!best || runs[i].chance > best->chance)) best = runs + i;
        if (!best) return num_own;
        int to = nodes.child(best->node, best->next);
        if (to < 0) {
            if (nodes.count - chain == limits.nodes || nodes.count == kMaxNodes - 1) return num_own;
            nodes.tokens[nodes.count] = best->next;
            nodes.parents[nodes.count] = best->node;
            to = ++nodes.count;
        }
        if (best == runs) own[num_own++] = to;
        best->advance(text, to);
    }
}

}  // namespace slip
