#include "copies.h"

#include <cmath>

namespace slip {

int Nodes::child(int parent, int64_t token) const {
    for (int i = 0; i < count; ++i)
        if (parents[i] == parent && tokens[i] == token) return i + 1;
    return -1;
}

double price(double row, int rows) {
    const auto work = [](double n) { return n * n / (n + 8); };
    return row == 0 ? 0.0 : row * (work(rows + 1) - work(rows));
}

int copy_run(const Text& text, const int64_t* path, int depth, int most, double least, int64_t* tokens, double* chances) {
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

void Prospect::begin(const Text* from) {
    text = from;
    match = from ? from->ending() : Match{0, 0};
    chance = 1.0;
    score = 0.0f;
    depth = 0;
}

int64_t Prospect::copied() const { return text && depth < kMaxNodes - 1 ? text->follower(match, 0, path, depth) : -1; }

double Prospect::copied_chance() const { return copied() < 0 ? 0.0 : text->chance(match.length); }

double Prospect::worth() const {
    const double fails = 2.0 * (1.0 - copied_chance());
    return fails < 1.0 ? chance * fails : chance;
}

double Prospect::add(int64_t token, float to, double trust) {
    if (!text) {
        chance = std::exp(trust * to);
        return 0.0;
    }
    const double drafted = std::exp(trust * (static_cast<double>(to) - score)), copy = copied_chance();
    double beside = 0.0;
    if (copy > 0.0 && copied() == token) {
        chance *= 1.0 - (1.0 - copy) * (1.0 - drafted);
    } else {
        const double doubted = copy * copy;  // a text that the draft contradicts is right less often than it says
        beside = chance * doubted * (1.0 - drafted) / (1.0 - doubted * drafted);
        chance *= drafted * (1.0 - doubted) / (1.0 - doubted * drafted);
    }
    score = to;
    match = text->then(match, token);
    if (depth < kMaxNodes) path[depth++] = token;
    return beside;
}

void Copying::foresee(const Text& text) {
    next = depth < kMaxNodes - 1 ? text.follower(match, step, path, depth) : -1;
    if (next >= 0) chance *= text.chance(match.length + step);
}

void Copying::advance(const Text& text, int to) {
    path[depth++] = next;
    node = to;
    ++step;
    foresee(text);
}

void Growing::begin(const Text* text, const Nodes& chain, const float* scores, double lowest, double trust, const CopyLimits& limits, double* chances, Copying* runs) {
    text_ = text;
    nodes_ = chain;
    limits_ = limits;
    chances_ = chances;
    runs_ = runs;
    best_ = nullptr;
    guessed_ = copied_ = 0;
    Prospect prospect;
    prospect.begin(text);
    for (offered_ = 0;; ++offered_) {
        Copying& run = runs_[offered_];
        run = {prospect.match, 0, prospect.copied(), prospect.chance * prospect.copied_chance(), offered_, offered_, {}};
        for (int i = 0; i < offered_; ++i) run.path[i] = prospect.path[i];
        if (offered_ == chain.count || std::isinf(scores[offered_])) break;
        run.chance = prospect.add(chain.tokens[offered_], scores[offered_], trust);
        if (run.chance == 0.0) run.next = -1;
        if (prospect.chance < lowest) break;
        chances_[offered_] = prospect.chance;
    }
    nodes_.count = offered_;
    if (limits_.nodes > kMaxNodes - 1 - offered_) limits_.nodes = kMaxNodes - 1 - offered_;
}

double Growing::likeliest() {
    double best = guessed_ < offered_ ? chances_[guessed_] : -1.0;
    best_ = nullptr;
    for (int i = 0; copied_ < limits_.nodes && i <= guessed_; ++i) {
        Copying& run = runs_[i];
        if (run.next < 0 || run.depth >= limits_.depth || run.chance < limits_.least || run.chance <= best) continue;
        best_ = &run;
        best = run.chance;
    }
    return best;
}

void Growing::take() {
    if (!best_) {
        ++guessed_;
        return;
    }
    nodes_.tokens[nodes_.count] = best_->next;
    nodes_.parents[nodes_.count] = best_->node;
    ++copied_;
    best_->advance(*text_, ++nodes_.count);
}

int Growing::finish() {
    const int gap = offered_ - guessed_;
    for (int i = offered_; gap && i < nodes_.count; ++i) {
        nodes_.tokens[i - gap] = nodes_.tokens[i];
        nodes_.parents[i - gap] = nodes_.parents[i] > offered_ ? nodes_.parents[i] - gap : nodes_.parents[i];
    }
    return nodes_.count - gap;
}

int Growing::guessed() const { return guessed_; }

void grow(Growing* trees, int count, double row) {
    for (int rows = count;; ++rows) {
        Growing* best = nullptr;
        double chance = -1.0;
        for (int i = 0; i < count; ++i) {
            const double own = trees[i].likeliest();
            if (own <= chance) continue;
            best = trees + i;
            chance = own;
        }
        if (!best || chance < price(row, rows)) return;
        best->take();
    }
}

}  // namespace slip
