"""The native executor: between two prompts a step is little else than a round, and a backend may run it in one call.

A round does what an eager step does for rows that have one token to compute. Tokens, statistics and keys are the same;
only the Python between the parts is gone, which on a CPU takes as long as a third of the pass. With patience, a call
runs several rounds, until an answer ends: then the Python between rounds is gone too. Prompts run eagerly.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.executors.choice import nothing_left, read_logprobs
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.interface import DecodePass, RowOutput, StepInput, StepOutput, TokenLogprob, Work
from slipstream.executors.rows import Row
from slipstream.executors.runner import Runner
from slipstream.executors.stopwatch import Lap
from slipstream.kernels import (
    Borrowed,
    Copying,
    Cut,
    Follower,
    Hurry,
    Onward,
    RoundModels,
    RoundOps,
    RoundResult,
    RoundStart,
    one_pool,
)
from slipstream.kernels.rounds import AllowedNodes, DraftedNodes
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.speculation.borrowed import Borrowers
from slipstream.speculation.controller import Reach
from slipstream.speculation.drafter import CopyDrafter, Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter, Exchanged
from slipstream.speculation.grammar import forced_text, tree_along
from slipstream.speculation.tree import Tree

_MOST_ROUNDS = 16  # of a call


class NativeExecutor(EagerExecutor):
    """Runs rows that only decode as rounds, and the rest eagerly."""

    def __init__(self, runner: Runner, drafter: Drafter, num_rows: int) -> None:
        super().__init__(runner, drafter, num_rows)
        eagle = drafter if isinstance(drafter, Eagle3Drafter) else None
        self._models = RoundModels(
            runner.model,
            runner.kv,
            runner.captured_layers,
            None if eagle is None else eagle.draft,
            None if eagle is None else eagle.kv,
        )
        assert isinstance(runner.ops, RoundOps), "`runs_rounds` looked"
        self._run_rounds = runner.ops.run_rounds
        self._hurry = Hurry()
        self._round_s = 0.0  # what the last one took
        self._able = True  # until the kernels say that they cannot read these models
        self._eagle = eagle
        self._copies_alone = drafter if isinstance(drafter, CopyDrafter) else None
        self._mask_failures: dict[int, Exception] = {}  # at the roots of the round under way, by row

    def swap_draft(self, draft: Eagle3Draft, borrowers: Borrowers | None) -> Exchanged:
        """Draft with another draft of the same shape from the next round on; return what was used so far."""
        before = super().swap_draft(draft, borrowers)
        self._models = dataclasses.replace(self._models, draft=draft)
        return before

    @staticmethod
    def supports(runner: Runner, drafter: Drafter) -> bool:
        """Tell whether rounds can stand in for steps: the kernels have them, and the drafter is one they know."""
        whole = runner.model.ranks.size == 1
        return (
            whole and isinstance(runner.ops, RoundOps) and isinstance(drafter, NoDrafter | CopyDrafter | Eagle3Drafter)
        )

    def hurry(self) -> None:
        """Let a call under way end with the round it is at; any thread may ask."""
        self._hurry.ask()

    def ahead(self, patience_s: float) -> int:
        """Return how many tokens of a row as many rounds as patience allows could give, and a chain after them."""
        depth = self._chain_length()
        if patience_s <= 0 or depth is None or not self._able:
            return 0
        rounds = min(_MOST_ROUNDS, 2 + int(patience_s / max(self._round_s, patience_s / _MOST_ROUNDS)))
        return rounds * (1 + depth) + self._drafter.max_nodes - 1

    def submit(self, step: StepInput) -> None:
        """Run the step: rows that only decode as rounds, the rest in an eager pass."""
        with torch.inference_mode(), one_pool(self._runner.ops):
            self._take_in(step)
            self._lap = Lap(self.device)
            planned = [(self._rows[work.row], work) for work in step.work]
            depth = self._chain_length()
            fast = [] if depth is None or step.simulated else [item for item in planned if self._decodes(*item)]
            in_rounds = {row.number for row, _ in fast}
            rest = [item for item in planned if item[0].number not in in_rounds]
            patience_s = 0.0 if rest else step.patience_s
            results = self._rounds(fast, depth, patience_s, step.ahead) if fast and depth is not None else None
            if results is None:
                self._outputs.append(self._laps.told_with(StepOutput(self._run(planned, step)), self._lap))
                return
            outputs = self._run(rest, step)
            outputs += [output for result in results for output in self._committed(fast, result)]
            order = {work.row: place for place, work in enumerate(step.work)}
            outputs.sort(key=lambda output: order[output.row])  # a row's own stay in order
            self._outputs.append(self._laps.told_with(StepOutput(outputs, steps=len(results)), self._lap))

    def _chain_length(self) -> int | None:
        """Return how long the drafter's chains are, 0 without a draft; None if it grows trees or drafts in one pass."""
        if self._eagle is None:
            return 0
        return self._eagle.shape.num_nodes - 1 if self._eagle.follows_chains else None

    def _decodes(self, row: Row, work: Work) -> bool:
        """Tell whether a row has one token to compute, and a draft of its text, if it drafts."""
        if not self._able or work.num_tokens != 1 or not work.emits or row.num_output == 0 or row.failure is not None:
            return False
        if not work.drafts and (self._eagle is None or not row.joined.speculate):
            return True
        return self._eagle is None or self._eagle.knows(row.number, len(row.tokens) - 1)

    def _rounds(
        self, planned: Sequence[tuple[Row, Work]], depth: int, patience_s: float, ahead: int
    ) -> list[RoundResult] | None:
        """Run rounds for as long as there is patience; None if the kernels cannot read these models."""
        rows = [row for row, _ in planned]
        followers: list[Follower | None] = [None] * len(rows)
        drafting = [] if self._eagle is None else [index for index, row in enumerate(rows) if row.joined.speculate]
        reach = Reach(0, Cut(least=CopyDrafter.least), passes=_MOST_ROUNDS)
        if self._eagle is not None and drafting:
            found, reach = self._eagle.begin_rounds({rows[index].number: rows[index].pages for index in drafting})
            for index, follower in zip(drafting, found, strict=True):
                followers[index] = follower
        wanted = [row.joined.limit - len(row.tokens) for row in rows]
        limits = [
            min(reach.depth, most - 1) if work.drafts else 0 for (_, work), most in zip(planned, wanted, strict=True)
        ]
        has_grammar = any(row.grammar is not None for row in rows)
        room = [
            min(self._drafter.max_nodes, most) - 1 if work.drafts and row.grammar is not None else 0
            for (row, work), most in zip(planned, wanted, strict=True)
        ]
        forced = [forced_text(row.grammar, most) if most else [] for row, most in zip(rows, room, strict=True)]
        # The draft guesses from the root, so there is nothing for it to guess within such a text.
        limits = [0 if len(text) >= limit else limit for text, limit in zip(forced, limits, strict=True)]
        # A grammar takes in what was emitted after the call.
        copying = self._copying(planned, wanted)
        most_copied = 0 if copying is None else max(copying.limits)
        rounds = 1 if has_grammar else self._num_rounds(reach, max(limits), patience_s, ahead - most_copied)
        ends = [row.joined.end_tokens for row in rows]
        start = RoundStart(
            pages=[row.pages for row in rows],
            roots=[row.tokens[-1] for row in rows],
            lengths=[len(row.tokens) - 1 for row in rows],
            sampling=self._chooser.state,
            slots=[row.number for row in rows],
            limits=limits,
            followers=followers,
            follow=reach.follows,
            borrowed=self._borrowed(rows, limits),
            onward=Onward(rounds, patience_s, wanted, ends, self._hurry),
            copying=copying,
            masks=functools.partial(self._fill_masks, rows, room) if has_grammar else None,
            room=room if has_grammar else (),
        )
        results = self._run_rounds(self._models, start, depth, reach.cut)
        self._hurry.take_back()
        self._able = results is not None
        if results is not None and has_grammar:
            results = [result.foretelling(forced) for result in results]
        if results is not None and self._eagle is not None and drafting:
            own = results if len(drafting) == len(rows) else [result.of(drafting) for result in results]
            self._eagle.end_rounds([rows[index].number for index in drafting], own)
        return results

    def _num_rounds(self, reach: Reach, most_drafted: int, patience_s: float, ahead: int) -> int:
        """Return how many rounds a call may run, by patience and by the pages there are."""
        if patience_s <= 0 or reach.passes == 1:
            return 1
        by_pages = (ahead - most_drafted) // (1 + most_drafted)
        by_time = 2 + int(patience_s / max(self._round_s, patience_s / _MOST_ROUNDS))
        return max(1, min(reach.passes, _MOST_ROUNDS, by_time, by_pages))

    def _borrowed(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Borrowed | None]:
        """Return what the rows that may draft have borrowed; nothing is looked up while drafting rests."""
        eagle = self._eagle
        if eagle is None or eagle.borrowers is None or not any(limits):
            return []
        return [
            eagle.borrowed(row.number, row.tokens) if limit else None for row, limit in zip(rows, limits, strict=True)
        ]

    def _copying(self, planned: Sequence[tuple[Row, Work]], wanted: Sequence[int]) -> Copying | None:
        """Return what the rows that may draft copy from; None if nothing is copied."""
        alone, eagle = self._copies_alone, self._eagle
        most = alone.copier.most if alone is not None else 0 if eagle is None else eagle.most_copied
        if most == 0 or not any(work.drafts for _, work in planned):
            return None
        see = alone.copier.see if alone is not None else eagle.copied_text if eagle is not None else None
        assert see is not None, "something is copied"
        texts = [see(row.number, row.tokens) if work.drafts else None for row, work in planned]
        limits = [min(most, left - 1) if work.drafts else 0 for (_, work), left in zip(planned, wanted, strict=True)]
        return Copying(texts, limits)

    def _committed(self, planned: Sequence[tuple[Row, Work]], result: RoundResult) -> list[RowOutput]:
        """Move rows on by what a round gave; rows past their end emit what nobody reads."""
        drafting_s, verify_s, extend_s = result.seconds
        self._round_s = sum(result.seconds)
        context = sum(len(row.tokens) for row, _ in planned) / len(planned)
        num_emitted = sum(map(len, result.tokens))
        self._lap.add_pass(DecodePass(context, len(planned), num_emitted, drafting_s + extend_s, verify_s))
        outputs = []
        for (row, _), tokens, drafted, place in zip(planned, result.tokens, result.drafted, result.places, strict=True):
            path = [(token, node) for node, token in enumerate(tokens)]
            failed: dict[int, Exception] = {}
            if not tokens:
                path, failed = [(-1, 0)], {0: self._mask_failures.get(row.number) or nothing_left()}
            logprobs: dict[int, TokenLogprob] = {}
            num_top = row.joined.params.logprobs
            if num_top is not None and result.sampled is not None:
                found = read_logprobs(result.sampled, range(place, place + len(tokens)), num_top)
                logprobs = dict(enumerate(found))
            outputs.append(row.emit(1, path, drafted.by_depth(), logprobs, failed))
        return outputs

    def _fill_masks(
        self,
        rows: Sequence[Row],
        room: Sequence[int],
        emitted: Sequence[Sequence[int]],
        drafted: Sequence[DraftedNodes],
        words_MW: Tensor,
    ) -> list[AllowedNodes]:
        """Let grammars draft, write what they leave at the rows' roots and nodes, and return each row's."""
        nodes = [
            _along(row, found, most) if most else found for row, found, most in zip(rows, drafted, room, strict=True)
        ]
        trees = [_tree(row.tokens[-1], own) for row, own in zip(rows, nodes, strict=True)]
        masks = self._chooser.masks(rows, trees)
        assert masks is not None, "a row has a grammar"
        words_MW[: len(masks.words_MW)] = masks.words_MW
        starts = list(accumulate((len(tree.tokens) for tree in trees), initial=0))
        roots = {start: row.number for row, start in zip(rows, starts[:-1], strict=True)}
        self._mask_failures = {roots[node]: error for node, error in masks.failed.items() if node in roots}
        parts = (masks.row_L[start:end] for start, end in itertools.pairwise(starts))
        return [AllowedNodes(own, part) for own, part in zip(nodes, parts, strict=True)]


def _along(row: Row, drafted: DraftedNodes, most: int) -> DraftedNodes:
    """Return a row's nodes as its grammar drafts them: the draft's chain first, as far as it is allowed."""
    found = tree_along(_tree(row.tokens[-1], drafted), row.grammar, most, trunk=drafted.guessed)
    if found is None:
        return drafted
    tokens, parents = found[0][1:], found[1][1:]
    pairs = zip(tokens, parents, drafted.tokens[: drafted.guessed], itertools.count(), strict=False)
    guessed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[2] and pair[1] == pair[3], pairs))
    return DraftedNodes(tokens, parents, guessed)


def _tree(root: int, nodes: DraftedNodes) -> Tree:
    """Return a tree with all that masks ask of it."""
    return Tree([root, *nodes.tokens], [-1, *nodes.parents], [], [])
