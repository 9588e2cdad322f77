"""The EAGLE-3 drafter: keeps the draft's keys in step with the target's, and grows trees from its last slot.

Each step the target commits some positions; `observe` runs the draft over them with the target's true features
(draft-extend), so nothing the draft imagined is kept. Slot t pairs the features of position t with token t + 1, and
the last slot's logits are the first level of the next tree.

Shape letters: R requests, T slots, D draft width, V draft vocabulary, K tokens of a chain.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels import Borrowed, Candidates, ChainOps, ChainStart, CopyText, Cut, Follower, Ops, RoundResult
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.speculation.borrowed import Borrowers
from slipstream.speculation.controller import Reach
from slipstream.speculation.copying import Copier
from slipstream.speculation.drafter import DraftView, Observed
from slipstream.speculation.grow import with_trees
from slipstream.speculation.late import LatePages, LateRun
from slipstream.speculation.levels import LevelsStart, grown_trees
from slipstream.speculation.merge import CopyLimits, Drafted, grow
from slipstream.speculation.outcomes import chains_of
from slipstream.speculation.pace import Pace
from slipstream.speculation.tree import MAX_NODES, TreeBatch, TreeShape

_REST = 256  # tokens the draft may be late with while drafting does not pay: most answers end before that
_UNTOLD = 1_000  # passes: where nothing is learned, each is cut as the one before
_LEFT_BYTES = 64 * 2**20  # of states that requests may leave behind for those that begin with their pages


@dataclass(frozen=True)
class Beside:
    """What a draft works with beside its own guesses.

    Args:
        menu: shapes that captured steps choose among; none: the one shape.
        borrowers: let requests be drafted tokens of their own text that the draft does not know.
        copier: hangs what the text itself would go on with beside the draft's chains.
    """

    borrowers: Borrowers | None = None
    copier: Copier | None = None
    menu: tuple[TreeShape, ...] = ()


@dataclass
class _LastSlot:
    """What the draft left at a request's last slot: the next step's hidden state, and logits for the first level.

    A round in one call moves the slot on and leaves no logits; they follow from the state.
    """

    length: int
    feedback_D: Tensor
    logits_V: Tensor | None


class Exchanged(NamedTuple):
    """A draft that was in use, with what let requests borrow tokens it does not know."""

    draft: Eagle3Draft
    borrowers: Borrowers | None


class Eagle3Drafter:
    """Grows trees with an EAGLE-3 draft. `captured_layers` is already resolved against the target.

    With a `pace`, chains end where going on would not pay; without one, every tree has the whole shape.
    """

    name = "EAGLE-3"
    has_kv = True

    def __init__(
        self,
        draft: Eagle3Draft,
        kv: KvCache,
        shape: TreeShape,
        captured_layers: tuple[int, ...],
        ops: Ops,
        pace: Pace | None = None,
        beside: Beside = Beside(),  # noqa: B008 (frozen)
    ) -> None:
        self._pace, self._borrowers, self._copier = pace, beside.borrowers, beside.copier
        self._draft = draft
        self._kv = kv
        self._ops = ops
        self._last: dict[int, _LastSlot] = {}
        self._followers: dict[int, tuple[Follower, Sequence[int]]] = {}
        self._guesses: dict[int, Sequence[int]] = {}  # of the round under way, where it is paced
        self._left = LatePages(kv.page_size, _LEFT_BYTES)
        self.shape: TreeShape = shape
        self.menu = beside.menu or (shape,)
        self.captured_layers = captured_layers

    @property
    def max_nodes(self) -> int:
        """Nodes of a full tree and its root, copied ones included."""
        return max(most_nodes(shape, self.most_copied) for shape in self.menu)

    @property
    def most_copied(self) -> int:
        """Copied nodes of a tree, at most."""
        return 0 if self._copier is None else self._copier.most

    @property
    def scratch(self) -> int:
        """Draft keys a tree needs beyond the committed ones."""
        return max(shape.scratch for shape in self.menu)

    @property
    def follows_chains(self) -> bool:
        """Whether a token is drafted at a time, each after the one before."""
        return self.shape.width == 1 and not self.shape.paths and self._draft.mask_features_C is None

    @property
    def window(self) -> int | None:
        """How many keys the draft's attention sees, the last ones; None for all."""
        return self._draft.spec.sliding_window

    @property
    def draft(self) -> Eagle3Draft:
        """The draft itself."""
        return self._draft

    @property
    def kv(self) -> KvCache:
        """The draft's keys and values."""
        return self._kv

    @property
    def borrowers(self) -> Borrowers | None:
        """What lets requests borrow tokens that the draft does not know, if anything does."""
        return self._borrowers

    def propose(self, views: Sequence[DraftView]) -> TreeBatch:
        """Return a tree for each view; a request the draft has not caught up with may only copy.

        Where all are such, and nodes are chosen by their cost, nothing is: beside prompts no row is cheap.
        """
        known = [index for index, view in enumerate(views) if self.knows(view.request_id, len(view.tokens) - 1)]
        roots = TreeBatch.lone_roots([view.tokens[-1] for view in views], self._draft.token_ids_V.device)
        if not known:
            return roots if self._pace is not None else self._grown(views, roots, {}, Cut())
        grown = [views[index] for index in known]
        self._catch_up({view.request_id: len(view.tokens) - 1 for view in grown})
        most = self.shape.num_nodes - 1
        reach = Reach(most) if self._pace is None else self._pace.start(len(views), most)
        if reach.depth == 0:
            return self._grown(views, roots, dict.fromkeys(known, ()), reach.cut)
        candidates = self._chains(grown, reach.cut)
        if candidates is None:
            start = LevelsStart(*self._stacked([self._last[view.request_id] for view in grown]), self._borrowed(grown))
            candidates = grown_trees(self._draft, self._kv, self._ops, grown, start, self.shape)
        trees = with_trees(roots, known, candidates)
        if self._copier is None and self._pace is None:
            return trees
        return self._grown(views, trees, dict(zip(known, candidates.scores_RC.tolist(), strict=True)), reach.cut)

    def _grown(
        self, views: Sequence[DraftView], trees: TreeBatch, scores: Mapping[int, Sequence[float]], cut: Cut
    ) -> TreeBatch:
        """Let trees grow of what was drafted and of what each text would go on with, as far as nodes are worth it."""
        if self._copier is None and self._pace is None:
            return trees
        drafted, texts, limits = [], [], []
        for index, (view, tree) in enumerate(zip(views, trees.unpack(), strict=True)):
            drafted.append(Drafted(tree.tokens, tree.parents, [0.0, *scores.get(index, ())]))
            texts.append(None if self._copier is None else self._copier.see(view.request_id, view.tokens))
            limits.append(CopyLimits(min(self.most_copied, view.wanted - 1), view.wanted - 1))
        grown = grow(drafted, texts, limits, cut)
        if self._pace is not None and scores:
            names = [views[index].request_id for index in scores]
            self._pace.drafted(names, list(scores.values()), [grown[index].guessed for index in scores])
            self._guesses = dict(zip(names, (drafted[index].tokens[1:] for index in scores), strict=True))
        return TreeBatch.pack([(tree.tokens, tree.parents) for tree in grown], trees.tokens_RN.device)

    def copied_text(self, request_id: int, tokens: Sequence[int]) -> CopyText:
        """Return a request's text to copy from, as far as these tokens."""
        assert self._copier is not None, "asked for only where it is copied from"
        return self._copier.see(request_id, tokens)

    def observe(self, observed: Sequence[Observed], captured: tuple[Tensor, ...]) -> None:
        """Run the draft over the committed positions with the target's true features."""
        if not observed:
            return
        if self._pace is not None:
            own = {seen.request_id: self._num_right(seen) for seen in observed}
            alone = all(len(seen.rows) - 1 == own[seen.request_id] for seen in observed)
            self._pace.checked(own, alone)
        self._catch_up({seen.request_id: seen.start for seen in observed})
        for seen in observed:
            if seen.request_id not in self._last:
                self._take_up(seen)
        rows_T = torch.tensor([row for seen in observed for row in seen.rows], device=captured[0].device)
        self._extend(observed, tuple(state[rows_T] for state in captured))

    def _num_right(self, seen: Observed) -> int:
        """Return how many tokens of the last guess were committed: others may have come from elsewhere."""
        guess = self._guesses.pop(seen.request_id, ())
        pairs = zip(guess, seen.next_tokens[: len(seen.rows) - 1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _extend(self, observed: Sequence[Observed], features: tuple[Tensor, ...]) -> None:
        """Run the draft over positions with the target's true features, row by row as they are observed."""
        device = features[0].device
        tokens_T = torch.tensor([token for seen in observed for token in seen.next_tokens], device=device)
        slots_T = torch.cat([torch.arange(seen.start, seen.start + len(seen.rows), device=device) for seen in observed])
        queries = QueryTokens([len(seen.rows) for seen in observed], slots_T, slots_T, torch.full_like(slots_T, -1))
        ctx = paged_context(self._ops, self._kv, page_table([seen.pages for seen in observed], device), queries)
        fused_TD = self._draft.fuse(features, self._ops)
        hidden = self._draft(fused_TD, tokens_T, ctx)
        last_R = ctx.batch.query_starts_R1[1:].long() - 1
        logits_RV = self._draft.logits(hidden.normed_TD[last_R], self._ops)
        feedback_RD = hidden.feedback_TD[last_R]
        for index, seen in enumerate(observed):
            self._last[seen.request_id] = _LastSlot(seen.start + len(seen.rows), feedback_RD[index], logits_RV[index])

    def forget(self, request_id: int, num_reusable: int = 0) -> None:
        """Drop the request's last slot; what the draft is late with is left to requests that begin with its pages.

        Where there is no room to leave it, the draft follows now.
        """
        follower, pages = self._followers.get(request_id, (None, ()))
        last = self._last.get(request_id)
        if follower is not None and last is not None and follower.late > last.length - num_reusable:
            run = _late_run(follower, last.length)
            run = run.part(run.start, min(run.end, num_reusable))
            if not self._left.leave(pages, run):
                with torch.inference_mode():
                    self._follow([(request_id, pages, run)])
        self._followers.pop(request_id, None)
        self._last.pop(request_id, None)
        if self._borrowers is not None:
            self._borrowers.forget(request_id)
        if self._copier is not None:
            self._copier.forget(request_id)

    def lose_page(self, page: int) -> None:
        """Drop what was left behind in a page: it is given to somebody else."""
        self._left.lose(page)

    def _take_up(self, seen: Observed) -> None:
        """Let the draft follow what others left late in the pages a request begins with."""
        for run in self._left.take_up(seen.pages, seen.start):
            self._follow([(seen.request_id, seen.pages, run)])

    def knows(self, request_id: int, length: int) -> bool:
        """Tell whether the draft has caught up with a request that has so many committed tokens."""
        last = self._last.get(request_id)
        return last is not None and last.length == length

    def begin_rounds(self, pages: Mapping[int, Sequence[int]]) -> tuple[list[Follower], Reach]:
        """Start rounds that run as one call; return what follows each request, and how far drafting pays.

        Every request must be known. The call changes the followers, and `end_rounds` says how far it went.

        Args:
            pages: of each request.
        """
        for request_id, held in pages.items():
            if request_id not in self._followers:
                feedback_D, num_features = self._last[request_id].feedback_D, self._draft.fc.in_features
                self._followers[request_id] = (Follower.start(feedback_D, num_features, _REST + self.max_nodes), held)
        followers = [self._followers[request_id][0] for request_id in pages]
        if self._pace is None:
            return followers, Reach(self.shape.num_nodes - 1, passes=_UNTOLD)
        reach = self._pace.start(len(pages), self.shape.num_nodes - 1)
        if not reach.follows and any(follower.late >= _REST for follower in followers):
            return followers, Reach(reach.depth, reach.cut, follows=True)
        return followers, reach

    def borrowed(self, request_id: int, tokens: Sequence[int]) -> Borrowed | None:
        """Return which tokens of its text a request has borrowed; None if none."""
        return None if self._borrowers is None else self._borrowers.see(request_id, tokens)

    def end_rounds(self, request_ids: Sequence[int], results: Sequence[RoundResult]) -> None:
        """Take in what rounds did to the requests they began with."""
        for result in results:
            for request_id, tokens in zip(request_ids, result.tokens, strict=True):
                last = self._last[request_id]
                last.length += len(tokens)
                last.logits_V = None
        if self._pace is not None:
            self._pace.finished([(chains_of(result), result.seconds) for result in results])

    def _catch_up(self, lengths: Mapping[int, int]) -> None:
        """End rounds for some requests: let the draft follow what it is late with, if they still have these lengths."""
        late = []
        for request_id, length in lengths.items():
            follower, pages = self._followers.pop(request_id, (None, ()))
            if follower is not None and follower.late and self.knows(request_id, length):
                late.append((request_id, pages, _late_run(follower, length)))
        if late:
            self._follow(late)

    def _follow(self, late: Sequence[tuple[int, Sequence[int], LateRun]]) -> None:
        """Run the draft over what it is late with, for requests with their pages."""
        observed = [Observed(name, run.start, run.tokens, range(len(run.tokens)), pages) for name, pages, run in late]
        features_TF = torch.cat([run.states_LF for _, _, run in late])
        width = self._draft.spec.target_hidden_size
        self._extend(observed, features_TF.view(len(features_TF), -1, width).unbind(1))

    def _stacked(self, slots: Sequence[_LastSlot]) -> tuple[Tensor, Tensor]:
        """Return feedback [R, D] and logits [R, V], computing those a round did not leave."""
        feedback_RD = torch.stack([slot.feedback_D for slot in slots])
        logits = [slot.logits_V for slot in slots]
        if any(row is None for row in logits):
            return feedback_RD, self._draft.foretell(feedback_RD, self._ops)
        return feedback_RD, torch.stack([row for row in logits if row is not None])

    def resume(self, lengths: Mapping[int, int], feedback_RD: Tensor, logits_RV: Tensor) -> None:
        """Take over requests whose draft keys were written elsewhere, with what the draft left at their last slots."""
        for row, (request_id, length) in enumerate(lengths.items()):
            self._followers.pop(request_id, None)
            self._last[request_id] = _LastSlot(length, feedback_RD[row], logits_RV[row])

    def pretend(self, request_id: int, length: int) -> None:
        """Take a request's first `length` tokens for observed, with nothing in mind about the next one."""
        table = self._draft.embed_tokens
        feedback_1D = torch.zeros(1, self._draft.spec.hidden_size, dtype=table.dtype, device=table.device)
        self.resume({request_id: length}, feedback_1D, self._draft.logits(feedback_1D, self._ops))

    def explain(self) -> dict[str, object]:
        """Say how far drafting pays by what was learned; nothing where every tree has the whole shape."""
        return {} if self._pace is None else self._pace.explain()

    def reshape(self, shape: TreeShape) -> None:
        """Grow trees of another shape, from now on in full and with nothing copied beside them."""
        self._settle_followers()
        self.shape, self.menu = shape, (shape,)
        self._pace = self._copier = None

    def exchange(self, draft: Eagle3Draft, borrowers: Borrowers | None) -> Exchanged:
        """Draft with another draft of the same shape from now on; return what was used so far."""
        self._settle_followers()
        before = Exchanged(self._draft, self._borrowers)
        if self._borrowers is not None:
            self._borrowers.forget_all()
        self._draft, self._borrowers = draft, borrowers
        for last in self._last.values():  # what the other draft thought of the next token is in its own vocabulary
            last.logits_V = None
        return before

    def _settle_followers(self) -> None:
        """End rounds for all requests, the draft following what it is late with."""
        with torch.inference_mode():
            self._catch_up({request_id: self._last[request_id].length for request_id in list(self._followers)})

    def _chains(self, views: Sequence[DraftView], cut: Cut) -> Candidates | None:
        """Draft chains in one call where the shape is a chain and the kernels can; the levels below give the same."""
        shape, ops = self.shape, self._ops
        if not self.follows_chains or self._draft.ranks.size > 1 or not isinstance(ops, ChainOps):
            return None
        device = self._draft.token_ids_V.device
        slots = [self._last[view.request_id] for view in views]
        start = ChainStart(
            page_table([view.pages for view in views], device),
            self._kv.page_size,
            torch.tensor([slot.length for slot in slots], device=device),
            torch.tensor([view.temperature for view in views], device=device),
            torch.tensor([view.seed for view in views], device=device),
            *self._stacked(slots),
            self._borrowed(views),
        )
        drafted = ops.draft_chain(self._draft, self._kv, start, shape.num_nodes - 1, cut)
        if drafted is None:
            return None
        scores_RK, tokens_RK = drafted
        parents_RK = torch.arange(-1, shape.num_nodes - 2, device=device).expand_as(tokens_RK)
        return Candidates(tokens_RK, parents_RK, scores_RK)

    def _borrowed(self, views: Sequence[DraftView]) -> list[Borrowed | None]:
        return [self.borrowed(view.request_id, view.tokens) for view in views] if self._borrowers is not None else []


def most_nodes(shape: TreeShape, most_copied: int) -> int:
    """Return how many nodes a tree may have, its root included."""
    return max(shape.num_nodes, min(shape.num_nodes + most_copied, MAX_NODES))


def _late_run(follower: Follower, length: int) -> LateRun:
    """Return what a draft is late with in a request of so many committed tokens."""
    late = follower.late
    return LateRun(length - late, follower.late_tokens_L[:late].tolist(), follower.late_states_LF[:late])
