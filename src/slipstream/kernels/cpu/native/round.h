// Rounds of decoding as one call. Each drafts chains, checks them in one pass of the target, keeps what it agrees to, and
// runs the draft over what was kept, now or when it next drafts. Every part is a call that exists on its own, so the bits
// are those of the parts.
#pragma once
#include <chrono>
#include <stdexcept>

#include "chain.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kHeadRows = 48;  // rows of logits held at a time

// The rows of one pass over some requests, in the order of the requests.
struct RowsRoom {
    int32_t *starts, *lengths;
    int64_t *index, *causal, *slots, *tokens;

    void take(Scratch& room, int requests, int rows) {
        starts = room.take<int32_t>(requests + 1);
        lengths = room.take<int32_t>(requests);
        index = room.take<int64_t>(rows);
        causal = room.take<int64_t>(rows);
        slots = room.take<int64_t>(rows);
        tokens = room.take<int64_t>(rows);
    }
};

class RoundWork {
  public:
    // `round`: where the outputs are those of this round.
    RoundWork(Pool& pool, Rooms& rooms, const RoundModels& models, const Rounds& round)
        : pool_(pool), rooms_(rooms), m_(models), r_(round), target_(*models.target) {
        take_room();
    }

    // Tells whether there was a round: whoever makes masks may end the call before it.
    bool run(int number) {
        const double began = now();
        draft();
        if (r_.fill_masks) fill_masks(number);
        if (stopped_) return false;
        const double drafted = now();
        check();
        accept();
        const double checked = now();
        remember();
        if (r_.follow) follow(true);
        r_.seconds[0] = drafted - began;
        r_.seconds[1] = checked - drafted;
        r_.seconds[2] = now() - checked;
        return true;
    }

    static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

  private:
    void take_room() {
        int limits = 0, late = 0;
        for (int i = 0; i < r_.requests; ++i) {
            limits += r_.limits[i];
            if (m_.draft && r_.feedback[i]) late += r_.late[i];
        }
        const int requests = r_.requests, rows = requests + limits, width = target_.width, behind = rows + late;
        const int held = rows < kHeadRows ? rows : kHeadRows;
        const int64_t features = static_cast<int64_t>(target_.num_captured) * width;
        Scratch& room = rooms_.round;
        for (int pass = 0; pass < 2; ++pass) {
            room.begin(pass == 1);
            checked_.take(room, requests, rows);
            followed_.take(room, requests, behind);
            hidden_ = room.take<float>(static_cast<int64_t>(rows) * width);
            normed_ = room.take<float>(static_cast<int64_t>(rows) * width);
            logits_ = room.take<float>(static_cast<int64_t>(held) * m_.ends->head.n);
            temperature_ = room.take<float>(requests);
            seed_ = room.take<int64_t>(requests);
            position_ = room.take<int64_t>(rows);
            slot_ = room.take<int64_t>(rows);
            path_ = room.take<int64_t>(static_cast<int64_t>(rows) * r_.depth);
            mask_row_ = room.take<int64_t>(rows);
            off_path_ = room.take<uint8_t>(rows);
            logprob_ = room.take<float>(held);
            top_ids_ = room.take<int64_t>(static_cast<int64_t>(held) * kMaxTop);
            top_logprobs_ = room.take<float>(static_cast<int64_t>(held) * kMaxTop);
            chosen_ = room.take<int64_t>(rows);
            who_ = room.take<int32_t>(requests);
            captured_ = room.take<float>(features * rows);
            captured_out_ = room.take<float*>(target_.num_captured);
            if (!m_.draft) continue;
            const int64_t inner = m_.draft_blocks->width;
            features_ = room.take<float>(features * behind);
            stream_ = room.take<float>(inner * behind);
            embedding_ = room.take<float>(inner * behind);
            chain_hidden_ = room.take<float>(inner * requests);
            chain_normed_ = room.take<float>(inner * requests);
            chain_logits_ = room.take<float>(requests * static_cast<int64_t>(m_.draft->ends.head.n));
            chain_pages_ = room.take<int32_t>(requests * r_.page_table_stride);
            chain_scores_ = room.take<float>(requests * static_cast<int64_t>(r_.depth));
            chain_tokens_ = room.take<int64_t>(requests * static_cast<int64_t>(r_.depth));
            chain_borrowed_ = room.take<Borrowed>(requests);
        }
        for (int i = 0; i < target_.num_captured; ++i) captured_out_[i] = captured_ + static_cast<int64_t>(i) * rows * width;
        target_.captured_out = captured_out_;
    }

    const int32_t* pages(int request) const { return r_.page_table + request * r_.page_table_stride; }
    int64_t slot(int request, int64_t index) const {
        return static_cast<int64_t>(pages(request)[index / r_.page_size]) * r_.page_size + index % r_.page_size;
    }

    const Slot& slot_of(int request) const { return r_.sampling.slots[r_.sampling_slots[request]]; }

    // What the draft's head reads of a stream; also what is fed back, where that is fed after the norm.
    void draft_normed(const float* stream, float* out, int rows) {
        const Ends& ends = m_.draft->ends;
        rms_norm(pool_, stream, m_.draft_blocks->width, ends.norm, out, rows, m_.draft_blocks->width, ends.eps);
    }

    // Draft for the requests that may, in one chain call; count what is worth checking.
    void draft() {
        int count = 0, depth = 0;
        for (int i = 0; i < r_.requests; ++i) {
            r_.checked[i] = 0;
            for (int level = 0; level < r_.depth; ++level) r_.scores[static_cast<int64_t>(i) * r_.depth + level] = -__builtin_inff();
            if (r_.limits[i] == 0) continue;
            ++count;
            depth = r_.limits[i] > depth ? r_.limits[i] : depth;
        }
        if (count == 0) return;
        follow(false);
        const int width = m_.draft_blocks->width;
        count = 0;
        for (int i = 0; i < r_.requests; ++i)
            if (r_.limits[i] > 0) who_[count++] = i;
        for (int at = 0; at < count; ++at) {
            const int i = who_[at];
            copy_row(chain_hidden_ + static_cast<int64_t>(at) * width, r_.feedback[i], width);
            std::memcpy(chain_pages_ + at * r_.page_table_stride, pages(i), sizeof(int32_t) * static_cast<size_t>(r_.page_table_stride));
            position_[at] = r_.lengths[i];
            temperature_[at] = static_cast<float>(slot_of(i).temperature);
            seed_[at] = slot_of(i).seed;
            if (r_.borrowed) chain_borrowed_[at] = r_.borrowed[i];
        }
        const float* normed = chain_hidden_;
        if (!m_.draft->normed_feedback) {
            draft_normed(chain_hidden_, chain_normed_, count);
            normed = chain_normed_;
        }
        linear(pool_, rooms_.call, m_.draft->ends.head, normed, width, count, chain_logits_);
        draft_chain(pool_, rooms_.call, rooms_.chain, *m_.draft_blocks, *m_.draft,
                    {chain_pages_, position_, temperature_, seed_, chain_logits_, chain_hidden_,
                     r_.borrowed ? chain_borrowed_ : nullptr, chain_scores_, chain_tokens_,
                     r_.page_table_stride, count, r_.page_size, depth, r_.floor, r_.need});
        for (int at = 0; at < count; ++at) {
            const int i = who_[at];
            bool goes_on = true;
            for (int level = 0; level < r_.limits[i]; ++level) {
                const int64_t from = static_cast<int64_t>(at) * depth + level;
                r_.scores[static_cast<int64_t>(i) * r_.depth + level] = chain_scores_[from];
                r_.emitted[static_cast<int64_t>(i) * (r_.depth + 1) + level] = chain_tokens_[from];
                goes_on = goes_on && chain_scores_[from] >= r_.floor;
                r_.checked[i] += goes_on;
            }
        }
    }

    Batch batch_of(const RowsRoom& rows, int requests, const int32_t* page_table) const {
        return {rows.starts, rows.lengths, page_table, rows.index, rows.causal, rows.slots, rows.index,
                r_.page_table_stride, requests, rows.starts[requests], r_.page_size, 0};
    }

    void add_row(RowsRoom& rows, int row, int request, int64_t index, int64_t token) const {
        rows.index[row] = index;
        rows.causal[row] = -1;
        rows.slots[row] = slot(request, index);
        rows.tokens[row] = token;
    }

    void fill_masks(int number) {
        stopped_ = r_.fill_masks(number) != 0;
        for (int64_t at = 0; !stopped_ && at < static_cast<int64_t>(r_.requests) * (r_.depth + 1); ++at)
            if (r_.mask_rows[at] >= r_.masks) throw std::out_of_range("a mask that is not there");
    }

    // The target's token at every root and every drafted token.
    void check() {
        int count = 0;
        for (int i = 0; i < r_.requests; ++i) {
            const int64_t* drafted = r_.emitted + static_cast<int64_t>(i) * (r_.depth + 1);
            checked_.starts[i] = count;
            checked_.lengths[i] = static_cast<int32_t>(r_.lengths[i] + 1 + r_.checked[i]);
            for (int node = 0; node <= r_.checked[i]; ++node, ++count) {
                add_row(checked_, count, i, r_.lengths[i] + node, node ? drafted[node - 1] : r_.roots[i]);
                slot_[count] = r_.sampling_slots[i];
                position_[count] = r_.lengths[i] + 1 + node;  // of the token being chosen
                mask_row_[count] = r_.fill_masks ? r_.mask_rows[static_cast<int64_t>(i) * (r_.depth + 1) + node] : -1;
                for (int level = 0; level < r_.depth; ++level) path_[static_cast<int64_t>(count) * r_.depth + level] = level < node ? drafted[level] : -1;
            }
        }
        checked_.starts[r_.requests] = count;
        const int width = target_.width;
        const Ends& ends = *m_.ends;
        for (int row = 0; row < count; ++row) embed_token(ends.embedding, checked_.tokens[row], width, hidden_ + static_cast<int64_t>(row) * width);
        run_layers(pool_, rooms_.call, target_, batch_of(checked_, r_.requests, r_.page_table), hidden_, nullptr);
        rms_norm(pool_, hidden_, width, ends.norm, normed_, count, width, ends.eps);
        for (int row = 0; row < count; row += kHeadRows) {
            const int rows = count - row < kHeadRows ? count - row : kHeadRows;
            linear(pool_, rooms_.call, ends.head, normed_ + static_cast<int64_t>(row) * width, width, rows, logits_);
            const SampleCall call{r_.sampling, slot_ + row, position_ + row, path_ + static_cast<int64_t>(row) * r_.depth, r_.words,
                                  mask_row_ + row, r_.num_words, rows, r_.depth};
            sample_tokens(pool_, rooms_.call, call, logits_, chosen_ + row);
            score(call, row);
        }
    }

    // The log probabilities of the tokens on the way that the target goes, where they are wanted.
    void score(const SampleCall& call, int row) {
        int request = 0;
        for (int at = row; at < row + call.rows; ++at) {
            while (at >= checked_.starts[request + 1]) ++request;
            const bool root = at == checked_.starts[request];
            off_path_[at] = !root && (off_path_[at - 1] || chosen_[at - 1] != checked_.tokens[at]);
        }
        score_tokens(pool_, rooms_.call, call, logits_, off_path_ + row, {chosen_ + row, logprob_, top_ids_, top_logprobs_});
        request = 0;
        for (int at = row; at < row + call.rows; ++at) {
            while (at >= checked_.starts[request + 1]) ++request;
            if (off_path_[at] || slot_of(request).num_top < 0) continue;
            const int64_t to = static_cast<int64_t>(request) * (r_.depth + 1) + at - checked_.starts[request];
            r_.scored.logprob[to] = logprob_[at - row];
            std::memcpy(r_.scored.top_ids + to * kMaxTop, top_ids_ + static_cast<int64_t>(at - row) * kMaxTop, sizeof(int64_t) * kMaxTop);
            std::memcpy(r_.scored.top_logprobs + to * kMaxTop, top_logprobs_ + static_cast<int64_t>(at - row) * kMaxTop, sizeof(float) * kMaxTop);
        }
    }

    void accept() {
        for (int i = 0; i < r_.requests; ++i) {
            const int first = checked_.starts[i];
            int kept = 0;
            while (kept < r_.checked[i] && chosen_[first + kept] == checked_.tokens[first + kept + 1]) ++kept;
            if (chosen_[first + kept] < 0) --kept;  // nothing may follow: the last token that may is the root of another round
            r_.kept[i] = kept;
            int32_t* said = slot_of(i).uses & PENALTIES ? r_.sampling.said + r_.sampling_slots[i] * r_.sampling.vocab : nullptr;
            for (int node = 0; node <= kept; ++node) {
                r_.emitted[static_cast<int64_t>(i) * (r_.depth + 1) + node] = chosen_[first + node];
                if (said) said[chosen_[first + node]] += 2;
            }
        }
    }

    // Keep the target's states of what stays, with the token after each, until the draft follows.
    void remember() {
        if (!m_.draft) return;
        const size_t width = static_cast<size_t>(target_.width);
        for (int i = 0; i < r_.requests; ++i) {
            if (!r_.feedback[i]) continue;
            for (int node = 0; node <= r_.kept[i]; ++node, ++r_.late[i]) {
                float* to = r_.late_states[i] + static_cast<int64_t>(r_.late[i]) * m_.draft->fuse.k;
                const int64_t from = static_cast<int64_t>(checked_.starts[i] + node) * target_.width;
                for (int state = 0; state < target_.num_captured; ++state)
                    std::memcpy(to + static_cast<int64_t>(state) * target_.width, captured_out_[state] + from, sizeof(float) * width);
                r_.late_tokens[i][r_.late[i]] = r_.emitted[static_cast<int64_t>(i) * (r_.depth + 1) + node];
            }
        }
    }

    // Run the draft over what stayed, with the target's true states; nothing it imagined is kept. `after`: this round's
    // tokens are among it.
    void follow(bool after) {
        if (!m_.draft) return;
        int requests = 0, count = 0;
        for (int i = 0; i < r_.requests; ++i) {
            if (!r_.feedback[i] || r_.late[i] == 0) continue;
            const int64_t end = r_.lengths[i] + (after ? 1 + r_.kept[i] : 0), begin = end - r_.late[i];
            who_[requests] = i;
            followed_.starts[requests] = count;
            followed_.lengths[requests] = static_cast<int32_t>(end);
            for (int at = 0; at < r_.late[i]; ++at, ++count) {
                add_row(followed_, count, i, begin + at, r_.late_tokens[i][at]);
                norm_features(r_.late_states[i] + static_cast<int64_t>(at) * m_.draft->fuse.k, count);
            }
            std::memcpy(chain_pages_ + requests * r_.page_table_stride, pages(i), sizeof(int32_t) * static_cast<size_t>(r_.page_table_stride));
            r_.late[i] = 0;
            ++requests;
        }
        followed_.starts[requests] = count;
        if (requests == 0) return;
        const Draft& draft = *m_.draft;
        const int width = m_.draft_blocks->width;
        linear(pool_, rooms_.call, draft.fuse, features_, draft.fuse.k, count, stream_);
        for (int row = 0; row < count; ++row)
            embed_token(draft.ends.embedding, followed_.tokens[row], width, embedding_ + static_cast<int64_t>(row) * width);
        run_layers(pool_, rooms_.call, *m_.draft_blocks, batch_of(followed_, requests, chain_pages_), stream_, embedding_);
        for (int at = 0; at < requests; ++at) {
            const float* last = stream_ + static_cast<int64_t>(followed_.starts[at + 1] - 1) * width;
            if (draft.normed_feedback) draft_normed(last, r_.feedback[who_[at]], 1);
            else copy_row(r_.feedback[who_[at]], last, width);
        }
    }

    // A token's captured states as the draft wants them normed.
    void norm_features(const float* states, int row) {
        const Draft& draft = *m_.draft;
        const int width = target_.width;
        float* out = features_ + static_cast<int64_t>(row) * draft.fuse.k;
        if (draft.fuse_norm == NORM_JOINED) return rms_norm_row(states, draft.fuse_norms, out, draft.fuse.k, draft.fuse_eps);
        if (draft.fuse_norm == NO_NORM) return copy_row(out, states, draft.fuse.k);
        for (int64_t at = 0; at < draft.fuse.k; at += width) rms_norm_row(states + at, draft.fuse_norms + at, out + at, width, draft.fuse_eps);
    }

    Pool& pool_;
    Rooms& rooms_;
    const RoundModels& m_;
    const Rounds& r_;
    Stack target_;
    RowsRoom checked_, followed_;
    float *hidden_, *normed_, *logits_, *temperature_, *captured_, **captured_out_, *features_, *stream_, *embedding_;
    float *chain_hidden_, *chain_normed_, *chain_logits_, *chain_scores_;
    float *logprob_, *top_logprobs_;
    int64_t *seed_, *position_, *slot_, *path_, *mask_row_, *top_ids_, *chosen_, *chain_tokens_;
    uint8_t* off_path_;
    bool stopped_ = false;
    Borrowed* chain_borrowed_;
    int32_t *who_, *chain_pages_;
};

// Where the requests of some rounds stand.
class RoundsWork {
  public:
    RoundsWork(Scratch& room, const RoundModels& models, const Rounds& rounds) : m_(models), r_(rounds) {
        const int requests = r_.requests;
        for (int pass = 0; pass < 2; ++pass) {
            room.begin(pass == 1);
            roots_ = room.take<int64_t>(requests);
            lengths_ = room.take<int64_t>(requests);
            left_ = room.take<int64_t>(requests);
            limits_ = room.take<int32_t>(requests);
        }
        for (int i = 0; i < requests; ++i) {
            roots_[i] = r_.roots[i];
            lengths_[i] = r_.lengths[i];
            left_[i] = r_.wanted[i];
            limits_[i] = r_.limits[i];
        }
    }

    // The n-th round as a call of its own would have it.
    Rounds round(int n) const {
        const int64_t before = static_cast<int64_t>(n) * r_.requests;
        Rounds one = r_;
        one.roots = roots_;
        one.lengths = lengths_;
        one.limits = limits_;
        one.scores += before * r_.depth;
        one.checked += before;
        one.kept += before;
        one.emitted += before * (r_.depth + 1);
        one.scored.logprob += before * (r_.depth + 1);
        one.scored.top_ids += before * (r_.depth + 1) * kMaxTop;
        one.scored.top_logprobs += before * (r_.depth + 1) * kMaxTop;
        one.seconds += 3 * n;
        return one;
    }

    // Take in what a round gave; tell whether another can follow.
    bool advance(const Rounds& done) {
        bool goes_on = true;
        for (int i = 0; i < r_.requests; ++i) {
            const int count = done.kept[i] + 1;
            if (count == 0) {
                goes_on = false;
                continue;
            }
            const int64_t* tokens = done.emitted + static_cast<int64_t>(i) * (r_.depth + 1);
            roots_[i] = tokens[count - 1];
            lengths_[i] += count;
            left_[i] -= count;
            if (limits_[i] >= left_[i]) limits_[i] = left_[i] > 1 ? static_cast<int32_t>(left_[i] - 1) : 0;
            goes_on = goes_on && left_[i] > 0 && !ends(i, tokens, count) && fits(i);
        }
        return goes_on;
    }

  private:
    bool ends(int request, const int64_t* tokens, int count) const {
        for (int32_t at = r_.end_starts[request]; at < r_.end_starts[request + 1]; ++at)
            for (int i = 0; i < count; ++i)
                if (tokens[i] == r_.ends[at]) return true;
        return false;
    }

    bool fits(int i) const {
        const int64_t keys = lengths_[i] + 1 + limits_[i];
        const bool follows = m_.draft && r_.feedback[i];
        if (follows && (keys > m_.draft_blocks->layers->positions || r_.late[i] + 1 + limits_[i] > r_.capacity)) return false;
        return keys <= r_.slots[i] && keys <= m_.target->layers->positions;
    }

    const RoundModels& m_;
    const Rounds& r_;
    int64_t *roots_, *lengths_, *left_;
    int32_t* limits_;
};

static void run_rounds(Pool& pool, Rooms& rooms, const RoundModels& models, const Rounds& rounds) {
    *rounds.ran = 0;
    if (rounds.requests == 0) return;
    RoundsWork work(rooms.rounds, models, rounds);
    const double began = RoundWork::now();
    for (int n = 0; n < rounds.rounds; ++n) {
        const double start = RoundWork::now();
        const Rounds one = work.round(n);
        if (!RoundWork(pool, rooms, models, one).run(n)) return;
        *rounds.ran = n + 1;
        const double end = RoundWork::now();
        const bool hurry = rounds.hurry && *const_cast<const volatile int32_t*>(rounds.hurry) != 0;
        if (!work.advance(one) || hurry || (end - began) + (end - start) > rounds.patience) return;
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
