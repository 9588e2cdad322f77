#include "text.h"

#include <stdexcept>

namespace slip {

namespace {

constexpr double kPriorWeight = 4.0;  // guesses that what was seen elsewhere counts for
constexpr double kMemory = 0.97;      // of guesses, per guess of the same class
constexpr int kRefreshed = 8;         // endings whose last occurrence is moved on with each token, the longest first
constexpr int64_t kMostTokens = int64_t{1} << 29;

int class_of(int64_t length) {
    if (length < 5) return static_cast<int>(length) - 1;
    return length < 7 ? 4 : length < 10 ? 5 : length < 16 ? 6 : length < 32 ? 7 : 8;
}

}  // namespace

Text::Text(const double* prior) {
    for (int i = 0; i < kMatchClasses; ++i) prior_[i] = prior[i];
    table_.assign(64, -1);
    new_state(0, -1, 0);
}

void Text::extend(const int64_t* tokens, int64_t count, bool learns) {
    if (size() + count > kMostTokens) throw std::length_error("a text too long to index");
    for (int64_t i = 0; i < count; ++i) {
        const Match match = ending();
        if (learns && match.length > 0) {
            const int at = class_of(match.length);
            tried_[at] = kMemory * tried_[at] + 1.0;
            right_[at] = kMemory * right_[at] + (follower(match, 0, nullptr, 0) == tokens[i] ? 1.0 : 0.0);
        }
        // Only now do the ending's own states say where the text ends: until here they named an earlier occurrence.
        int32_t state = last_;
        for (int n = 0; n < kRefreshed && state > 0; ++n) {
            states_[static_cast<size_t>(state)].end = static_cast<int32_t>(size());
            state = states_[static_cast<size_t>(state)].link;
        }
        add(tokens[i]);
    }
}

Match Text::ending() const {
    const int32_t link = states_[static_cast<size_t>(last_)].link;
    return link < 0 ? Match{0, 0} : Match{link, states_[static_cast<size_t>(link)].length};
}

Match Text::then(Match match, int64_t token) const {
    for (;;) {
        const int32_t edge = find(match.state, token);
        if (edge >= 0) return {edges_[static_cast<size_t>(edge)].to, match.length + 1};
        const int32_t link = states_[static_cast<size_t>(match.state)].link;
        if (link < 0) return {0, 0};
        match = {link, states_[static_cast<size_t>(link)].length};
    }
}

double Text::chance(int64_t length) const {
    const int at = class_of(length);
    return (right_[at] + kPriorWeight * prior_[at]) / (tried_[at] + kPriorWeight);
}

int64_t Text::follower(Match match, int64_t step, const int64_t* drafted, int64_t num_drafted) const {
    if (match.length == 0) return -1;
    const int64_t at = states_[static_cast<size_t>(match.state)].end + step;
    if (at < size()) return tokens_[static_cast<size_t>(at)];
    return at - size() < num_drafted ? drafted[at - size()] : -1;
}

void Text::add(int64_t token) {
    tokens_.push_back(token);
    const int32_t end = static_cast<int32_t>(size());
    const int32_t state = new_state(end, 0, end);
    int32_t from = last_;
    int32_t edge = -1;
    for (; from >= 0 && (edge = find(from, token)) < 0; from = states_[static_cast<size_t>(from)].link) connect(from, token, state);
    if (from >= 0) {
        const int32_t to = edges_[static_cast<size_t>(edge)].to;
        const int32_t length = states_[static_cast<size_t>(from)].length + 1;
        int32_t link = to;
        if (states_[static_cast<size_t>(to)].length != length) {
            link = new_state(length, states_[static_cast<size_t>(to)].link, states_[static_cast<size_t>(to)].end);
            for (int32_t e = states_[static_cast<size_t>(to)].edges; e >= 0; e = edges_[static_cast<size_t>(e)].next)
                connect(link, edges_[static_cast<size_t>(e)].token, edges_[static_cast<size_t>(e)].to);
            for (; from >= 0 && (edge = find(from, token)) >= 0 && edges_[static_cast<size_t>(edge)].to == to;
                 from = states_[static_cast<size_t>(from)].link)
                edges_[static_cast<size_t>(edge)].to = link;
            states_[static_cast<size_t>(to)].link = link;
        }
        states_[static_cast<size_t>(state)].link = link;
    }
    last_ = state;
}

int32_t Text::new_state(int32_t length, int32_t link, int32_t end) {
    states_.push_back({length, link, end, -1});
    return static_cast<int32_t>(states_.size()) - 1;
}

uint64_t Text::place(int32_t state, int64_t token) const {
    uint64_t key = (static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32) ^ static_cast<uint64_t>(token);
    key *= 0x9E3779B97F4A7C15ull;
    return (key ^ (key >> 29)) & (table_.size() - 1);
}

int32_t Text::find(int32_t state, int64_t token) const {
    for (uint64_t at = place(state, token); table_[at] >= 0; at = (at + 1) & (table_.size() - 1)) {
        const Edge& edge = edges_[static_cast<size_t>(table_[at])];
        if (edge.from == state && edge.token == token) return table_[at];
    }
    return -1;
}

void Text::connect(int32_t from, int64_t token, int32_t to) {
    if (2 * edges_.size() >= table_.size()) grow();
    uint64_t at = place(from, token);
    while (table_[at] >= 0) at = (at + 1) & (table_.size() - 1);
    table_[at] = static_cast<int32_t>(edges_.size());
    edges_.push_back({token, from, to, states_[static_cast<size_t>(from)].edges});
    states_[static_cast<size_t>(from)].edges = table_[at];
}

void Text::grow() {
    table_.assign(2 * table_.size(), -1);
    for (size_t i = 0; i < edges_.size(); ++i) {
        uint64_t at = place(edges_[i].from, edges_[i].token);
        while (table_[at] >= 0) at = (at + 1) & (table_.size() - 1);
        table_[at] = static_cast<int32_t>(i);
    }
}

}  // namespace slip
