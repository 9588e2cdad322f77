// What a tree is made of: a drafted chain, and after every node of it what the text goes on with as it did before. The draft's
// confidence and the text's each say something of the other's token. ../../../speculation/merge.py is the same for any tree.
// Compiled once, not for each instruction set.
#pragma once
#include "text.h"

namespace slip {

constexpr int kMaxNodes = 64;  // of a tree, its root included

// A request's nodes, numbered from 1; the first are the draft's chain. At most kMaxNodes - 1.
struct Nodes {
    int64_t* tokens;
    int32_t* parents;
    int count;

    int child(int parent, int64_t token) const;  // -1: none
};

struct CopyLimits {
    int nodes;  // that may be added
    int depth;  // of a path
    double least;  // chance of being kept
};

// What another row costs beside so many, in tokens: the first are multiplied while the weights of the next are read.
double price(double row, int rows);

// One run after a path of tokens that follow the text; the path and what is copied fit in a tree.
int copy_run(const Text& text, const int64_t* path, int depth, int most, double least, int64_t* tokens, double* chances);

// A drafted chain as far as it goes, with the chance that all of it is kept.
struct Prospect {
    const Text* text;  // null: the draft alone says
    Match match;
    double chance;
    float score;  // cumulative log-probability
    int depth;
    int64_t path[kMaxNodes];

    void begin(const Text* from);

    // What the text goes on with after the chain, -1 for nothing, and the chance of that.
    int64_t copied() const;
    double copied_chance() const;

    // What another level counts for. It helps where copying fails, and says, too, where that will be.
    double worth() const;

    // Go on with a drafted token; return the chance of the text's own token beside it, 0 without another.
    double add(int64_t token, float to, double trust);
};

// What goes on after one node: `next` has the chance `chance`, and follows `path` after the text.
struct Copying {
    Match match;
    int64_t step, next;
    double chance;
    int node, depth;
    int64_t path[kMaxNodes];

    void foresee(const Text& text);
    void advance(const Text& text, int to);
};

// One request's tree under way: a chain whose nodes come one after another, and a run beside each of them.
class Growing {
  public:
    // `chain`: what was drafted, as far as its scores are finite. `chances` and `runs`: as many as its nodes, and one more.
    void begin(const Text* text, const Nodes& chain, const float* scores, double lowest, double trust, const CopyLimits& limits, double* chances, Copying* runs);

    // The chance of the likeliest node that may come next; -1 without any.
    double likeliest();
    void take();

    // Close the gap that chain nodes leave which did not come (nothing hangs on them); return how many nodes there are.
    int finish();

    int guessed() const;  // chain nodes that came

  private:
    const Text* text_;
    Nodes nodes_;
    CopyLimits limits_;
    double* chances_;
    Copying *runs_, *best_;
    int offered_, guessed_, copied_;
};

// Let trees grow together, the likeliest node of any first, as long as it is worth a row.
void grow(Growing* trees, int count, double row);

}  // namespace slip
