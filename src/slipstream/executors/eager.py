"""The eager executor: a step as the algorithm reads, part by part, on any device. The others are held to what it gives.

Everything planned runs in one pass: draft trees behind the last tokens of rows that emit, one pass of the target over
chunks and trees, the target's token at every node, and what agrees is kept.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from slipstream.errors import RankLostError
from slipstream.executors.batch import Batch, build_batch
from slipstream.executors.choice import Choice, Chooser, NodeMasks
from slipstream.executors.interface import Phase, RowOutput, StepCosts, StepInput, StepOutput, Work
from slipstream.executors.rows import Row
from slipstream.executors.runner import Runner
from slipstream.executors.stopwatch import Lap, Laps
from slipstream.kernels import one_pool
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Hidden
from slipstream.speculation.accept import Accepted, accept
from slipstream.speculation.borrowed import Borrowers
from slipstream.speculation.drafter import Drafter, Observed
from slipstream.speculation.eagle3_drafter import Eagle3Drafter, Exchanged
from slipstream.speculation.grammar import draft_along
from slipstream.speculation.simulate import simulate, simulated_counts
from slipstream.speculation.tree import Tree, TreeBatch, TreeShape

T = TypeVar("T")
_SCORED_ROWS = 64  # rows of prompt logits at a time: 64 rows of a vocabulary of 128k take 32 MiB


class Shared(Protocol):
    """How ranks share what only the first of them can make."""

    @property
    def draft_is_split(self) -> bool:
        """Whether every rank holds a part of the draft, and so has its trees."""
        ...

    def told(self, make: Callable[[], T]) -> T:
        """Return what the first rank makes, on every rank."""
        ...


class EagerExecutor:
    """Runs each step when it is submitted."""

    def __init__(self, runner: Runner, drafter: Drafter, num_rows: int, shared: Shared | None = None) -> None:
        self._runner = runner
        self._drafter = drafter
        self._shared = shared
        self._chooser = Chooser(runner.ops, num_rows, runner.model.spec.vocab_size, runner.device)
        self._rows: dict[int, Row] = {}
        self._outputs: list[StepOutput] = []
        self._lap, self._laps = Lap(runner.device), Laps()

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        return self._runner.device

    @property
    def drafter(self) -> Drafter:
        """What drafts."""
        return self._drafter

    @property
    def runner(self) -> Runner:
        """What runs the target."""
        return self._runner

    @property
    def lookahead(self) -> int:
        """None: a step has run when it is submitted."""
        return 0

    @property
    def in_flight(self) -> int:
        """Steps not collected yet."""
        return len(self._outputs)

    def ahead(self, patience_s: float) -> int:
        """Return 0: a call runs one step."""
        return 0

    def costs(self, num_decoding: int) -> StepCosts | None:
        """Return None: what a step costs is not known before."""
        return None

    def rest(self) -> StepOutput:
        """Wait for the device, and tell what was not told yet."""
        return self._laps.rest()

    def hurry(self) -> None:
        """Do nothing: a call runs one step."""

    def warm_up(self) -> list[str]:
        """Make nothing ready: kernels are compiled when they are first needed."""
        return []

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Never call back: there is no other rank to lose."""

    def submit(self, step: StepInput) -> None:
        """Run the step."""
        with torch.inference_mode(), one_pool(self._runner.ops):
            self._take_in(step)
            self._lap = Lap(self.device)
            rows = self._run([(self._rows[work.row], work) for work in step.work], step)
            self._outputs.append(self._laps.told_with(StepOutput(rows), self._lap))

    def collect(self) -> StepOutput:
        """Return what came of the step."""
        return self._outputs.pop(0)

    def explain(self) -> dict[str, object]:
        """Say what decides how far is drafted, and what it knows; nothing where nothing does."""
        return self._drafter.explain() if isinstance(self._drafter, Eagle3Drafter) else {}

    def reshape(self, shape: TreeShape) -> bool:
        """Draft trees of another shape; every row goes on."""
        self._drafter.reshape(shape)
        return False

    def swap_draft(self, draft: Eagle3Draft, borrowers: Borrowers | None) -> Exchanged:
        """Draft with another draft of the same shape from the next step on; return what was used so far."""
        assert isinstance(self._drafter, Eagle3Drafter), "`DraftShelf` looked"
        return self._drafter.exchange(draft, borrowers)

    def reset(self) -> None:
        """Forget every row and every step."""
        for number in self._rows:
            self._drafter.forget(number)
        self._rows.clear()
        self._outputs.clear()

    def _take_in(self, step: StepInput) -> None:
        """Follow the changes of the batch."""
        for left in step.left:
            self._drafter.forget(left.row, left.num_reusable)
            del self._rows[left.row]
        for page in step.lost_pages:
            self._drafter.lose_page(page)
        for joined in step.joined:
            row = self._rows[joined.row] = Row(joined)
            self._chooser.load(row)
            if joined.computed:
                self._drafter.pretend(joined.row, row.num_committed)
        for number, pages in step.pages.items():
            self._rows[number].pages += pages

    def _run(self, planned: Sequence[tuple[Row, Work]], step: StepInput) -> list[RowOutput]:
        """Run the planned rows in one pass; rows that have failed already say so."""
        failed = self._failed([row for row, _ in planned], step)
        outputs = [row.emit(0, (), (), {}, {}) for row, _ in planned if row.number in failed]
        planned = [(row, work) for row, work in planned if row.number not in failed]
        if not planned:
            return outputs
        emitting = [row for row, work in planned if work.emits]
        tree_batch = self._propose(planned).in_preorder()
        trees = tree_batch.unpack()
        phase = _phase(planned, trees)
        if phase == "verify":
            self._lap.begin_pass([row for row, _ in planned])
        batch = build_batch(planned, trees, self.device)
        with self._lap.timed(phase):
            hidden = self._runner.forward(batch, [row.pages for row, _ in planned])
            self._score_prompts(planned, batch, hidden)
            choice = self._choose(emitting, batch, trees, hidden)
            accepted = self._accept(emitting, step.simulated, tree_batch, trees, choice)
        kept = self._keep(planned, trees, accepted, choice, outputs)
        if phase == "verify":
            self._lap.end_pass(sum(len(output.tokens) for output in outputs))
        if self._drafter.has_kv:
            with self._lap.timed("draft" if phase == "verify" else phase):
                self._observe(planned, batch, kept, hidden)
        return outputs

    def _failed(self, rows: Sequence[Row], step: StepInput) -> set[int]:
        """Return the rows that failed as they joined; that a grammar did the first rank knows, and tells the others."""

        def failed() -> set[int]:
            return {row.number for row in rows if row.failure is not None}

        if self._shared is None or all(joined.params.grammar is None for joined in step.joined):
            return failed()
        return self._shared.told(failed)

    def _propose(self, planned: Sequence[tuple[Row, Work]]) -> TreeBatch:
        """Return a tree for each row that emits; those that may not draft get a lone root."""
        emitting = [(row, work) for row, work in planned if work.emits]
        roots = TreeBatch.lone_roots([row.tokens[-1] for row, _ in emitting], self.device)
        drafting = [index for index, (_, work) in enumerate(emitting) if work.drafts]
        if not drafting:
            return roots

        rows = [emitting[index][0] for index in drafting]
        with self._lap.timed("draft"):
            return roots.replace(drafting, self._drafted(rows).to(self.device))

    def _drafted(self, rows: Sequence[Row]) -> TreeBatch:
        """Return the drafter's trees, or what the rows' grammars make of them; the first rank follows grammars."""
        shared = self._shared

        def proposed() -> TreeBatch:
            return self._drafter.propose([row.view() for row in rows])

        def along(trees: TreeBatch) -> TreeBatch:
            return draft_along(trees, [row.grammar for row in rows], self._drafter.max_nodes - 1)

        if shared is None:
            return along(proposed())
        if not shared.draft_is_split:
            return shared.told(lambda: along(proposed()))
        trees = proposed()
        return shared.told(lambda: along(trees)) if any(row.grammar is not None for row in rows) else trees

    def _score_prompts(self, planned: Sequence[tuple[Row, Work]], batch: Batch, hidden: Hidden) -> None:
        """Give rows that want their prompt's log probabilities those of this chunk."""
        for (row, work), first in zip(planned, batch.first_rows, strict=True):
            wanted = [first + place for place in row.wanted_prompt_rows(row.num_committed, work.num_tokens)]
            for start in range(0, len(wanted), _SCORED_ROWS):
                self._chooser.score_prompt(row, self._runner.logits(hidden, wanted[start : start + _SCORED_ROWS]))

    def _choose(self, emitting: Sequence[Row], batch: Batch, trees: Sequence[Tree], hidden: Hidden) -> Choice | None:
        """Let the target choose at every node; None if no row emits."""
        if not emitting:
            return None

        def masks() -> NodeMasks | None:
            return self._chooser.masks(emitting, trees)

        has_grammar = any(row.grammar is not None for row in emitting)
        allowed = self._shared.told(masks) if self._shared is not None and has_grammar else masks()
        return self._chooser.choose(self._runner.logits(hidden, batch.logit_rows_L), emitting, trees, allowed)

    def _accept(
        self,
        emitting: Sequence[Row],
        simulated: tuple[float, ...],
        tree_batch: TreeBatch,
        trees: Sequence[Tree],
        choice: Choice | None,
    ) -> Accepted | None:
        """Walk the trees along the target's choices."""
        if choice is None:
            return None
        chosen_RN = torch.zeros_like(tree_batch.tokens_RN)
        chosen_RN[tree_batch.valid_RN] = choice.tokens_L
        if simulated:
            seed_R = torch.tensor([row.joined.seed for row in emitting])
            length_R = torch.tensor([len(row.tokens) for row in emitting])
            accepted = simulate(trees, chosen_RN, simulated_counts(simulated, seed_R, length_R).tolist())
        else:
            accepted = accept(tree_batch, chosen_RN)
        self._chooser.count(emitting, accepted.tokens_RE, accepted.counts_R)
        return accepted

    def _keep(
        self,
        planned: Sequence[tuple[Row, Work]],
        trees: Sequence[Tree],
        accepted: Accepted | None,
        choice: Choice | None,
        outputs: list[RowOutput],
    ) -> list[list[int] | None]:
        """Move rows on by what was accepted, and say so; return, for each row, the nodes whose keys stay.

        None for a row whose root failed: it has nothing to go on with.
        """
        kept: list[list[int] | None] = []
        columns = () if accepted is None else (accepted.counts_R, accepted.tokens_RE, accepted.nodes_RE)
        paths = zip(trees, *(column.tolist() for column in columns), strict=True)
        first_node = 0
        for row, work in planned:
            path: list[int] | None = []
            if not work.emits or choice is None:
                outputs.append(row.emit(work.num_tokens, (), (), {}, {}))
            else:
                tree, count, tokens, nodes = next(paths)
                pairs = list(zip(tokens[:count], nodes[:count], strict=True))
                failed = choice.failed(tokens[:count], nodes[:count], first_node)
                logprobs = choice.logprobs(row, nodes[:count], first_node)
                root = row.num_committed + work.num_tokens - 1
                before = len(row.tokens)
                outputs.append(row.emit(work.num_tokens, pairs, tree.nodes_by_depth(), logprobs, failed))
                path = nodes[1 : len(row.tokens) - before] if len(row.tokens) > before else None
                self._runner.keep(row.pages, root, path or ())
                first_node += len(tree.tokens)
            kept.append(path)
        return kept

    def _observe(
        self, planned: Sequence[tuple[Row, Work]], batch: Batch, kept: Sequence[Sequence[int] | None], hidden: Hidden
    ) -> None:
        """Show the drafter what the target committed, with the target's captured states."""
        observed = []
        for (row, work), first, path in zip(planned, batch.first_rows, kept, strict=True):
            if row.joined.speculate and path is not None:
                root_row = first + work.num_tokens - 1
                rows = [*range(first, root_row + 1), *(root_row + node for node in path)]
                start = row.num_committed - len(rows)
                followers = row.tokens[start + 1 : start + 1 + len(rows)]
                observed.append(Observed(row.number, start, followers, rows, row.pages))
        self._drafter.observe(observed, hidden.captured)


def _phase(planned: Sequence[tuple[Row, Work]], trees: Sequence[Tree]) -> Phase:
    """Return what a pass is for: prompts (or texts that start over), rows that decode, or both."""
    begins = [work.num_tokens > 1 or row.num_output == 0 for row, work in planned]
    if not any(begins):
        return "verify"
    return "prefill" if all(begins) and all(len(tree.tokens) == 1 for tree in trees) else "mixed"
