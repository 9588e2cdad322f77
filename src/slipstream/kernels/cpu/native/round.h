// Rounds of decoding as one call. Each drafts chains, hangs copied tokens beside them, checks the likeliest nodes in one pass of
// the target, keeps what it agrees to, and runs the draft over what was kept, now or when it next drafts. Every part is a
// call that exists on its own, so the bits are those of the parts.
#pragma once
#include <chrono>
#include <stdexcept>

#include "chain.h"
#include "copies.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr int kHeadRows = 48;  // rows of logits held at a time

// The rows of one pass over some requests, in the order of the requests.
struct RowsBuffers {
    int32_t *starts, *lengths;
    int64_t *index, *position, *seen, *slots, *tokens;

    void take(Scratch& scratch, int requests, int rows) {
        starts = scratch.take<int32_t>(requests + 1);
        lengths = scratch.take<int32_t>(requests);
        index = scratch.take<int64_t>(rows);
        position = scratch.take<int64_t>(rows);
        seen = scratch.take<int64_t>(rows);
        slots = scratch.take<int64_t>(rows);
        tokens = scratch.take<int64_t>(rows);
    }
};

class RoundWork {
  public:
    // `round`: where the outputs are those of this round.
    RoundWork(Pool& pool, Workspaces& workspaces, const RoundModels& models, const Rounds& round)
        : pool_(pool), workspaces_(workspaces), m_(models), r_(round), target_(*models.target) {
        take_scratch();
    }

    // Tells whether there was a round: whoever makes masks may end the call before it.
    bool run(int number) {
        const double began = now();
        const bool drafts = draft();
        choose();
        if (r_.fill_masks) fill_masks(number);
        if (stopped_) return false;
        const double drafted = now();
        const double followed_s = follow_s_;
        check();
        accept();
        const double checked = now();
        remember();
        if (r_.follow && (drafts || full())) follow(true);
        r_.seconds[0] = drafted - began - followed_s;
        r_.seconds[1] = checked - drafted;
        r_.seconds[2] = now() - checked + followed_s;
        return true;
    }

    static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

  private:
    void take_scratch() {
        int limits = 0, late = 0;
        for (int i = 0; i < r_.requests; ++i) {
            limits += drafted_most(r_, i, r_.limits[i]);
            if (m_.draft && r_.feedback[i]) late += r_.late[i];
        }
        const int requests = r_.requests, rows = requests + limits, width = target_.width, behind = rows + late;
        const int held = rows < kHeadRows ? rows : kHeadRows;
        const int64_t features = static_cast<int64_t>(target_.num_captured) * width;
        Scratch& scratch = workspaces_.round;
        for (int pass = 0; pass < 2; ++pass) {
            scratch.begin(pass == 1);
            checked_.take(scratch, requests, rows);
            followed_.take(scratch, requests, behind);
            hidden_ = scratch.take<float>(static_cast<int64_t>(rows) * width);
            normed_ = scratch.take<float>(static_cast<int64_t>(rows) * width);
            logits_ = scratch.take<float>(static_cast<int64_t>(held) * m_.ends->head.n);
            temperature_ = scratch.take<float>(requests);
            seed_ = scratch.take<int64_t>(requests);
            position_ = scratch.take<int64_t>(rows);
            slot_ = scratch.take<int64_t>(rows);
            path_ = scratch.take<int64_t>(static_cast<int64_t>(rows) * r_.nodes);
            path_nodes_ = scratch.take<int32_t>(static_cast<int64_t>(requests) * (r_.nodes + 1));
            level_ = scratch.take<int32_t>(rows);
            trees_ = scratch.take<Growing>(requests);
            runs_ = scratch.take<Copying>(static_cast<int64_t>(requests) * (r_.depth + 1));
            chances_ = scratch.take<double>(static_cast<int64_t>(requests) * (r_.depth + 1));
            mask_row_ = scratch.take<int64_t>(rows);
            off_path_ = scratch.take<uint8_t>(rows);
            logprob_ = scratch.take<float>(held);
            top_ids_ = scratch.take<int64_t>(static_cast<int64_t>(held) * kMaxTop);
            top_logprobs_ = scratch.take<float>(static_cast<int64_t>(held) * kMaxTop);
            chosen_ = scratch.take<int64_t>(rows);
            who_ = scratch.take<int32_t>(requests);
            captured_ = scratch.take<float>(features * rows);
            captured_out_ = scratch.take<float*>(target_.num_captured);
            if (!m_.draft) continue;
            const int64_t inner = m_.draft_blocks->width;
            features_ = scratch.take<float>(features * behind);
            stream_ = scratch.take<float>(inner * behind);
            embedding_ = scratch.take<float>(inner * behind);
            chain_hidden_ = scratch.take<float>(inner * requests);
            chain_normed_ = scratch.take<float>(inner * requests);
            chain_logits_ = scratch.take<float>(requests * static_cast<int64_t>(m_.draft->ends.head.n));
            chain_pages_ = scratch.take<int32_t>(requests * r_.page_table_stride);
            chain_scores_ = scratch.take<float>(requests * static_cast<int64_t>(r_.depth));
            chain_tokens_ = scratch.take<int64_t>(requests * static_cast<int64_t>(r_.depth));
            chain_borrowed_ = scratch.take<Borrowed>(requests);
            chain_texts_ = scratch.take<void*>(requests);
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

    int64_t* drafted(int request) const { return r_.drafted + static_cast<int64_t>(request) * r_.nodes; }
    int32_t* parents(int request) const { return r_.parents + static_cast<int64_t>(request) * r_.nodes; }

    // What a request copies from; null: nothing.
    const Text* text(int request) const { return r_.texts && r_.copies[request] > 0 ? static_cast<const Text*>(r_.texts[request]) : nullptr; }

    // Tell whether even a certain token would be worth a level of the draft, as things stand at a request's root.
    bool worth_drafting(int request) const {
        if (r_.limits[request] == 0) return false;
        Prospect prospect;
        prospect.begin(text(request));
        return prospect.worth() * r_.requests >= r_.need;
    }

    // Draft for the requests that may, in one chain call. Tells whether there were any.
    bool draft() {
        int count = 0, depth = 0;
        for (int i = 0; i < r_.requests; ++i) {
            r_.checked[i] = r_.guessed[i] = 0;
            for (int level = 0; level < r_.depth; ++level) r_.scores[static_cast<int64_t>(i) * r_.depth + level] = -__builtin_inff();
            if (!worth_drafting(i)) continue;
            who_[count++] = i;
            depth = r_.limits[i] > depth ? r_.limits[i] : depth;
        }
        if (count == 0) return false;
        follow(false);
        const int width = m_.draft_blocks->width;
        for (int at = 0; at < count; ++at) {
            const int i = who_[at];
            copy_row(chain_hidden_ + static_cast<int64_t>(at) * width, r_.feedback[i], width);
            std::memcpy(chain_pages_ + at * r_.page_table_stride, pages(i), sizeof(int32_t) * static_cast<size_t>(r_.page_table_stride));
            position_[at] = r_.lengths[i];
            temperature_[at] = static_cast<float>(slot_of(i).temperature);
            seed_[at] = slot_of(i).seed;
            chain_texts_[at] = const_cast<Text*>(text(i));
            if (r_.borrowed) chain_borrowed_[at] = r_.borrowed[i];
        }
        const float* normed = chain_hidden_;
        if (!m_.draft->normed_feedback) {
            draft_normed(chain_hidden_, chain_normed_, count);
            normed = chain_normed_;
        }
        linear(pool_, workspaces_.call, m_.draft->ends.head, normed, width, count, chain_logits_);
        draft_chain(pool_, workspaces_.call, workspaces_.chain, *m_.draft_blocks, *m_.draft,
                    {chain_pages_, position_, temperature_, seed_, chain_logits_, chain_hidden_,
                     r_.borrowed ? chain_borrowed_ : nullptr, chain_texts_, chain_scores_, chain_tokens_,
                     r_.page_table_stride, count, r_.page_size, depth, r_.floor, r_.need, r_.trust});
        for (int at = 0; at < count; ++at) {
            const int i = who_[at];
            for (int level = 0; level < r_.limits[i]; ++level) {
                const int64_t from = static_cast<int64_t>(at) * depth + level;
                r_.scores[static_cast<int64_t>(i) * r_.depth + level] = chain_scores_[from];
                drafted(i)[level] = chain_tokens_[from];
                parents(i)[level] = level;
            }
        }
        return true;
    }

    // Choose among what was drafted and what may be copied.
    void choose() {
        const int64_t most = r_.depth + 1;
        for (int i = 0; i < r_.requests; ++i) {
            const CopyLimits limits{text(i) ? r_.copies[i] : 0, r_.depths[i], r_.least};
            trees_[i].begin(text(i), {drafted(i), parents(i), r_.limits[i]}, r_.scores + static_cast<int64_t>(i) * r_.depth, std::exp(r_.trust * r_.floor), r_.trust, limits,
                            chances_ + i * most, runs_ + i * most);
        }
        grow(trees_, r_.requests, r_.row);
        for (int i = 0; i < r_.requests; ++i) {
            r_.guessed[i] = trees_[i].guessed();
            r_.checked[i] = trees_[i].finish();
        }
    }

    // How many of a request's emitted tokens copying alone would have had.
    int32_t foretold(int request) const {
        if (!text(request)) return 0;
        const int64_t* emitted = r_.emitted + static_cast<int64_t>(request) * (r_.nodes + 1);
        int64_t tokens[kMaxNodes];
        double chances[kMaxNodes];
        const int most = r_.kept[request] < r_.copies[request] ? r_.kept[request] : r_.copies[request];
        const int count = copy_run(*text(request), nullptr, 0, most, r_.least, tokens, chances);
        int right = 0;
        while (right < count && tokens[right] == emitted[right] && chances[right] >= price(r_.row, r_.requests + right)) ++right;
        return right;
    }

    Batch batch_of(const RowsBuffers& rows, int requests, const int32_t* page_table) const {
        return {rows.starts, rows.lengths, page_table, rows.index, rows.seen, rows.slots, rows.position,
                r_.page_table_stride, requests, rows.starts[requests], r_.page_size, 0};
    }

    void add_row(RowsBuffers& rows, int row, int request, int64_t index, int64_t token) const {
        rows.index[row] = rows.position[row] = index;
        rows.seen[row] = -1;
        rows.slots[row] = slot(request, index);
        rows.tokens[row] = token;
    }

    void fill_masks(int number) {
        stopped_ = r_.fill_masks(number) != 0;
        for (int64_t at = 0; !stopped_ && at < static_cast<int64_t>(r_.requests) * (r_.nodes + 1); ++at)
            if (r_.mask_rows[at] >= r_.masks) throw std::out_of_range("a mask that is not there");
        for (int i = 0; !stopped_ && i < r_.requests; ++i) {
            const int count = r_.checked[i];
            bool valid = count >= 0 && count <= drafted_most(r_, i, r_.limits[i]) && r_.guessed[i] <= count;
            for (int node = 0; valid && node < count; ++node)
                valid = parents(i)[node] >= 0 && parents(i)[node] <= node && drafted(i)[node] >= 0 && drafted(i)[node] < m_.ends->head.n;
            if (!valid) throw std::out_of_range("a tree that a grammar put there");
        }
    }

    // The target's token at every root and every drafted token.
    void check() {
        int count = 0;
        longest_ = 0;
        for (int i = 0; i < r_.requests; ++i) {
            const int first = count;
            checked_.starts[i] = first;
            checked_.lengths[i] = static_cast<int32_t>(r_.lengths[i] + 1 + r_.checked[i]);
            for (int node = 0; node <= r_.checked[i]; ++node, ++count) {
                const int parent = node ? parents(i)[node - 1] : 0;
                add_row(checked_, count, i, r_.lengths[i] + node, node ? drafted(i)[node - 1] : r_.roots[i]);
                level_[count] = node ? level_[first + parent] + 1 : 0;
                longest_ = level_[count] > longest_ ? level_[count] : longest_;
                // The keys a node sees, from its own back; the root's bits stand for all that comes before.
                if (node) checked_.seen[count] = static_cast<int64_t>(1 | static_cast<uint64_t>(checked_.seen[first + parent]) << (node - parent));
                checked_.position[count] = r_.lengths[i] + level_[count];
                slot_[count] = r_.sampling_slots[i];
                position_[count] = checked_.position[count] + 1;  // of the token being chosen
                mask_row_[count] = r_.fill_masks ? r_.mask_rows[static_cast<int64_t>(i) * (r_.nodes + 1) + node] : -1;
            }
        }
        for (int i = 0, row = 0; i < r_.requests; ++i) {
            for (int node = 0; node <= r_.checked[i]; ++node, ++row) {
                int64_t* path = path_ + static_cast<int64_t>(row) * longest_;
                for (int level = level_[row]; level < longest_; ++level) path[level] = -1;
                for (int at = node; at; at = parents(i)[at - 1]) path[level_[checked_.starts[i] + at] - 1] = drafted(i)[at - 1];
            }
        }
        checked_.starts[r_.requests] = count;
        const int width = target_.width;
        const Ends& ends = *m_.ends;
        for (int row = 0; row < count; ++row) embed_token(ends.embedding, checked_.tokens[row], width, hidden_ + static_cast<int64_t>(row) * width);
        run_layers(pool_, workspaces_.call, target_, batch_of(checked_, r_.requests, r_.page_table), hidden_, nullptr);
        rms_norm(pool_, hidden_, width, ends.norm, normed_, count, width, ends.eps);
        for (int row = 0; row < count; row += kHeadRows) {
            const int rows = count - row < kHeadRows ? count - row : kHeadRows;
            linear(pool_, workspaces_.call, ends.head, normed_ + static_cast<int64_t>(row) * width, width, rows, logits_);
            const SampleCall call{r_.sampling, slot_ + row, position_ + row, path_ + static_cast<int64_t>(row) * longest_, r_.words,
                                  mask_row_ + row, r_.num_words, rows, longest_};
            sample_tokens(pool_, workspaces_.call, call, logits_, chosen_ + row);
            score(call, row);
        }
    }

    // The log probabilities of the tokens on the way that the target goes, where they are wanted.
    void score(const SampleCall& call, int row) {
        int request = 0;
        for (int at = row; at < row + call.rows; ++at) {
            while (at >= checked_.starts[request + 1]) ++request;
            const int node = at - checked_.starts[request];
            const int parent = node ? checked_.starts[request] + parents(request)[node - 1] : at;
            off_path_[at] = node && (off_path_[parent] || chosen_[parent] != checked_.tokens[at]);
        }
        score_tokens(pool_, workspaces_.call, call, logits_, off_path_ + row, {chosen_ + row, logprob_, top_ids_, top_logprobs_});
        request = 0;
        for (int at = row; at < row + call.rows; ++at) {
            while (at >= checked_.starts[request + 1]) ++request;
            if (off_path_[at] || slot_of(request).num_top < 0) continue;
            const int64_t to = static_cast<int64_t>(request) * (r_.nodes + 1) + level_[at];
            r_.scored.logprob[to] = logprob_[at - row];
            std::memcpy(r_.scored.top_ids + to * kMaxTop, top_ids_ + static_cast<int64_t>(at - row) * kMaxTop, sizeof(int64_t) * kMaxTop);
            std::memcpy(r_.scored.top_logprobs + to * kMaxTop, top_logprobs_ + static_cast<int64_t>(at - row) * kMaxTop, sizeof(float) * kMaxTop);
        }
    }

    int32_t* path_nodes(int request) const { return path_nodes_ + static_cast<int64_t>(request) * (r_.nodes + 1); }

    void accept() {
        for (int i = 0; i < r_.requests; ++i) {
            const int first = checked_.starts[i];
            const Nodes nodes{drafted(i), parents(i), r_.checked[i]};
            int32_t* path = path_nodes(i);
            int kept = 0;
            path[0] = 0;
            for (int node; (node = nodes.child(path[kept], chosen_[first + path[kept]])) >= 0;) path[++kept] = node;
            if (chosen_[first + path[kept]] < 0) --kept;  // nothing may follow: the last token that may is the root of another round
            r_.kept[i] = kept;
            int32_t* said = slot_of(i).uses & PENALTIES ? r_.sampling.said + r_.sampling_slots[i] * r_.sampling.vocab : nullptr;
            for (int at = 0; at <= kept; ++at) {
                const int64_t token = chosen_[first + path[at]];
                r_.emitted[static_cast<int64_t>(i) * (r_.nodes + 1) + at] = token;
                if (said) said[token] += 2;
                if (path[at] != at) move_keys(slot(i, r_.lengths[i] + path[at]), slot(i, r_.lengths[i] + at));
            }
            r_.foretold[i] = foretold(i);
        }
    }

    // Put a kept node's keys where they stay. A node never lies before its place on the path, so none is lost.
    void move_keys(int64_t from, int64_t to) {
        for (int layer = 0; layer < target_.num_layers; ++layer) {
            const Kv& kv = target_.kv[layer];
            const int64_t heads = target_.layers[layer].kv_heads, bytes = kv.format == F32 ? 4 : kv.format == E4M3 ? 1 : 2;
            for (void* part : {kv.keys, kv.values}) copy_slot(part, from, to, kv.slot_stride * bytes, heads * target_.layers[layer].head_dim * bytes);
            if (kv.format != E4M3) continue;
            for (void* part : {kv.key_scales, kv.value_scales}) copy_slot(part, from, to, heads, heads);
        }
    }

    static void copy_slot(void* part, int64_t from, int64_t to, int64_t stride, int64_t bytes) {
        char* base = static_cast<char*>(part);
        std::memcpy(base + to * stride, base + from * stride, static_cast<size_t>(bytes));
    }

    // Keep the target's states of what stays, with the token after each, until the draft follows.
    void remember() {
        if (!m_.draft) return;
        const size_t width = static_cast<size_t>(target_.width);
        for (int i = 0; i < r_.requests; ++i) {
            if (!r_.feedback[i]) continue;
            for (int node = 0; node <= r_.kept[i]; ++node, ++r_.late[i]) {
                float* to = r_.late_states[i] + static_cast<int64_t>(r_.late[i]) * m_.draft->fuse.k;
                const int64_t from = static_cast<int64_t>(checked_.starts[i] + path_nodes(i)[node]) * target_.width;
                for (int state = 0; state < target_.num_captured; ++state)
                    std::memcpy(to + static_cast<int64_t>(state) * target_.width, captured_out_[state] + from, sizeof(float) * width);
                r_.late_tokens[i][r_.late[i]] = r_.emitted[static_cast<int64_t>(i) * (r_.nodes + 1) + node];
            }
        }
    }

    // Tell whether another round might leave more for the draft to follow than its buffers hold.
    bool full() const {
        for (int i = 0; m_.draft && i < r_.requests; ++i)
            if (r_.feedback[i] && r_.late[i] + 2 * (1 + r_.nodes) > r_.capacity) return true;
        return false;
    }

    // Run the draft over what stayed, with the target's true states; nothing it imagined is kept. `after`: this round's
    // tokens are among it.
    void follow(bool after) {
        if (!m_.draft) return;
        const double began = now();
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
        linear(pool_, workspaces_.call, draft.fuse, features_, draft.fuse.k, count, stream_);
        for (int row = 0; row < count; ++row)
            embed_token(draft.ends.embedding, followed_.tokens[row], width, embedding_ + static_cast<int64_t>(row) * width);
        run_layers(pool_, workspaces_.call, *m_.draft_blocks, batch_of(followed_, requests, chain_pages_), stream_, embedding_);
        for (int at = 0; at < requests; ++at) {
            const float* last = stream_ + static_cast<int64_t>(followed_.starts[at + 1] - 1) * width;
            if (draft.normed_feedback) draft_normed(last, r_.feedback[who_[at]], 1);
            else copy_row(r_.feedback[who_[at]], last, width);
        }
        follow_s_ += now() - began;
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
    Workspaces& workspaces_;
    const RoundModels& m_;
    const Rounds& r_;
    Stack target_;
    RowsBuffers checked_, followed_;
    float *hidden_, *normed_, *logits_, *temperature_, *captured_, **captured_out_, *features_, *stream_, *embedding_;
    float *chain_hidden_, *chain_normed_, *chain_logits_, *chain_scores_;
    float *logprob_, *top_logprobs_;
    int64_t *seed_, *position_, *slot_, *path_, *mask_row_, *top_ids_, *chosen_, *chain_tokens_;
    uint8_t* off_path_;
    int32_t *path_nodes_, *level_;
    int longest_ = 0;
    Growing* trees_;
    Copying* runs_;
    double* chances_;
    void** chain_texts_;
    double follow_s_ = 0.0;
    bool stopped_ = false;
    Borrowed* chain_borrowed_;
    int32_t *who_, *chain_pages_;
};

// Where the requests of some rounds stand.
class RoundsWork {
  public:
    RoundsWork(Scratch& scratch, const RoundModels& models, const Rounds& rounds) : m_(models), r_(rounds) {
        const int requests = r_.requests;
        for (int pass = 0; pass < 2; ++pass) {
            scratch.begin(pass == 1);
            roots_ = scratch.take<int64_t>(requests);
            lengths_ = scratch.take<int64_t>(requests);
            left_ = scratch.take<int64_t>(requests);
            limits_ = scratch.take<int32_t>(requests);
            depths_ = scratch.take<int32_t>(requests);
        }
        for (int i = 0; i < requests; ++i) {
            roots_[i] = r_.roots[i];
            lengths_[i] = r_.lengths[i];
            left_[i] = r_.wanted[i];
            limits_[i] = r_.limits[i];
            depths_[i] = r_.wanted[i] > kMaxNodes ? kMaxNodes - 1 : static_cast<int32_t>(r_.wanted[i] - 1);
        }
    }

    // The n-th round as a call of its own would have it.
    Rounds round(int n) const {
        const int64_t before = static_cast<int64_t>(n) * r_.requests;
        Rounds one = r_;
        one.roots = roots_;
        one.lengths = lengths_;
        one.limits = limits_;
        one.depths = depths_;
        one.scores += before * r_.depth;
        one.drafted += before * r_.nodes;
        one.parents += before * r_.nodes;
        one.guessed += before;
        one.checked += before;
        one.kept += before;
        one.foretold += before;
        one.emitted += before * (r_.nodes + 1);
        one.scored.logprob += before * (r_.nodes + 1);
        one.scored.top_ids += before * (r_.nodes + 1) * kMaxTop;
        one.scored.top_logprobs += before * (r_.nodes + 1) * kMaxTop;
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
            const int64_t* tokens = done.emitted + static_cast<int64_t>(i) * (r_.nodes + 1);
            if (r_.texts && r_.texts[i]) static_cast<Text*>(r_.texts[i])->extend(tokens, count, true);
            roots_[i] = tokens[count - 1];
            lengths_[i] += count;
            left_[i] -= count;
            if (limits_[i] >= left_[i]) limits_[i] = left_[i] > 1 ? static_cast<int32_t>(left_[i] - 1) : 0;
            if (depths_[i] >= left_[i]) depths_[i] = left_[i] > 1 ? static_cast<int32_t>(left_[i] - 1) : 0;
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
        const int64_t keys = lengths_[i] + 1 + drafted_most(r_, i, limits_[i]);
        const bool follows = m_.draft && r_.feedback[i];
        if (follows && (keys > m_.draft_blocks->layers->positions || r_.late[i] + keys - lengths_[i] > r_.capacity)) return false;
        return keys <= r_.slots[i] && keys <= m_.target->layers->positions;
    }

    const RoundModels& m_;
    const Rounds& r_;
    int64_t *roots_, *lengths_, *left_;
    int32_t *limits_, *depths_;
};

static void run_rounds(Pool& pool, Workspaces& workspaces, const RoundModels& models, const Rounds& rounds) {
    *rounds.ran = 0;
    if (rounds.requests == 0) return;
    RoundsWork work(workspaces.rounds, models, rounds);
    const double began = RoundWork::now();
    for (int n = 0; n < rounds.rounds; ++n) {
        const double start = RoundWork::now();
        const Rounds one = work.round(n);
        if (!RoundWork(pool, workspaces, models, one).run(n)) return;
        *rounds.ran = n + 1;
        const double end = RoundWork::now();
        const bool hurry = rounds.hurry && *const_cast<const volatile int32_t*>(rounds.hurry) != 0;
        if (!work.advance(one) || hurry || (end - began) + (end - start) > rounds.patience) return;
    }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
