// A request's text as a suffix automaton: what followed the last earlier occurrence of its ending is a guess at what
// follows now, and how often such guesses were right so far says how likely it is. ../../reference/text.py is the same.
#pragma once
#include <cstdint>
#include <vector>

namespace slip {

constexpr int kMatchClasses = 9;  // lengths of a match: 1, 2, 3, 4, 5 to 6, 7 to 9, 10 to 15, 16 to 31, and more

// Where some tokens end in the automaton: a state, and how many of them it matches.
struct Match {
    int32_t state;
    int32_t length;
};

class Text {
  public:
    // `prior`: how often guesses after matches of each class were right elsewhere.
    explicit Text(const double* prior);

    // `learns`: the tokens are an answer's, which says how good guesses are; a prompt's say little.
    void extend(const int64_t* tokens, int64_t count, bool learns);

    Match ending() const;
    Match then(Match match, int64_t token) const;

    // How likely a guess after a match of such a length is right.
    double chance(int64_t length) const;

    // The token that followed a match, and then the ones after it: `step` tokens on. `drafted` are tokens assumed behind the
    // text, which a match near its end reads on into. -1: nothing follows.
    int64_t follower(Match match, int64_t step, const int64_t* drafted, int64_t num_drafted) const;

    int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
    const double* tried() const { return tried_; }
    const double* right() const { return right_; }

  private:
    struct State {
        int32_t length, link, end, edges;
    };
    struct Edge {
        int64_t token;
        int32_t from, to, next;
    };

    void add(int64_t token);
    int32_t new_state(int32_t length, int32_t link, int32_t end);
    int32_t find(int32_t state, int64_t token) const;  // an edge; -1: none
    void connect(int32_t from, int64_t token, int32_t to);
    void grow();
    uint64_t place(int32_t state, int64_t token) const;

    std::vector<int64_t> tokens_;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> table_;  // open addressing, edges by state and token
    int32_t last_ = 0;
    double prior_[kMatchClasses], tried_[kMatchClasses] = {}, right_[kMatchClasses] = {};
};

}  // namespace slip
