"""The captured executor: decoding rows live on the device, a step is a few graph launches, the host is one step behind.

A row joins the batch when its prompt's last part has been computed and leaves it when its request does; nobody else's
state moves. Parts of prompts run between two steps. Rows that need what graphs cannot do (log probabilities of a
prompt, trees) run eagerly, alone.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.executors.choice import NodeMasks
from slipstream.executors.cuda_graph.flight import Decoding, Flight, goes_on
from slipstream.executors.cuda_graph.prepared import Prepared
from slipstream.executors.cuda_graph.prompts import Part
from slipstream.executors.cuda_graph.state import Loaded, StepModels
from slipstream.executors.cuda_graph.step import StepBuffers, StepKind
from slipstream.executors.cuda_graph.transfer import Arrival, download, upload
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.interface import StepCosts, StepInput, StepOutput, Work
from slipstream.executors.rows import Row
from slipstream.executors.runner import Runner
from slipstream.executors.stopwatch import Lap
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Linear
from slipstream.speculation.borrowed import Borrowers
from slipstream.speculation.drafter import Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter, Exchanged
from slipstream.speculation.lengths import REST, Choice, LengthController
from slipstream.speculation.simulate import thresholds
from slipstream.speculation.tree import Tree, TreeShape

_MOST_DRAFTED = 15
"""Chains are captured up to this length."""
_LENGTHS = (1, 3, 5, 7)
"""What is chosen among, up to the drafter's own length: each is captured for every batch size."""


class GraphExecutor(EagerExecutor):
    """Runs decoding rows ahead of the host; one step at work, one being read."""

    def __init__(
        self, runner: Runner, drafter: Drafter, num_rows: int, max_context: int, *, adapts: bool = False
    ) -> None:
        super().__init__(runner, drafter, num_rows + 1)  # the last slot is nobody's
        eagle = drafter if isinstance(drafter, Eagle3Drafter) else None
        self._models = StepModels(
            runner.ops,
            runner.model,
            runner.kv,
            runner.captured_layers,
            None if eagle is None else eagle.draft,
            None if eagle is None else eagle.kv,
        )
        self._eagle, self._max_context = eagle, max_context
        most_nodes = 1 if eagle is None else _MOST_DRAFTED + 1
        self._buffers = StepBuffers.allocate(self._models, self._chooser.state, max_context, most_nodes)
        self._state = self._buffers.state
        self._prepared = Prepared(self._models, self._buffers, max_context)
        self._simulated: tuple[float, ...] = ()
        self._flights: deque[Flight] = deque()
        self._places: dict[int, int] = {}
        self._free = list(range(num_rows))
        self._sent: dict[int, int] = {}  # tokens of each row whose computing was begun
        self._masked = False
        self._adapts, self._lengths = adapts, self._controller(adapts)
        self._late: set[int] = set()  # rows whose draft has not followed their text

    def _controller(self, adapts: bool) -> LengthController | None:
        """Return what chooses among lengths up to the drafter's; None where they are always the same."""
        longest = self._chain_length
        if not adapts or not longest:
            return None
        return LengthController([*(length for length in _LENGTHS if length < longest), longest])

    @staticmethod
    def supports(runner: Runner, drafter: Drafter) -> bool:
        """Tell whether steps can run so: the target is whole on one device, and the drafter a draft."""
        return runner.model.ranks.size == 1 and isinstance(drafter, NoDrafter | Eagle3Drafter)

    @property
    def lookahead(self) -> int:
        """One step, while chains are drafted; trees are drafted from the host."""
        return 0 if self._chain_length is None else 1

    @property
    def in_flight(self) -> int:
        """Steps not collected yet."""
        return len(self._flights)

    @property
    def _chain_length(self) -> int | None:
        """How long the drafter's chains are, 0 without a draft; None if it grows trees."""
        if self._eagle is None:
            return 0
        shape = self._eagle.shape
        is_chain = shape.width == 1 and not shape.paths and shape.is_chain and shape.depth <= _MOST_DRAFTED
        return shape.depth if is_chain else None

    def reshape(self, shape: TreeShape) -> bool:
        """Draft trees of another shape; rows start over where chains become trees, or trees chains."""
        before = self._chain_length
        self._drafter.reshape(shape)
        self._lengths = self._controller(self._adapts)
        return (before is None) != (self._chain_length is None)

    def swap_draft(self, draft: Eagle3Draft, borrowers: Borrowers | None) -> Exchanged:
        """Exchange the weights in place, behind the steps in flight: graphs hold the tensors of the draft in use."""
        assert self._eagle is not None, "`DraftShelf` looked"
        _exchange_weights(self._eagle.draft, draft)
        return self._eagle.exchange(self._eagle.draft, borrowers)._replace(draft=draft)

    def reset(self) -> None:
        """Forget every row and every step in flight."""
        super().reset()
        self._flights.clear()
        for place in self._places.values():
            self._state.unload(place)
        self._free = list(range(len(self._state.active_R) - 1))
        self._places.clear()
        self._sent.clear()
        self._late.clear()

    def warm_up(self) -> list[str]:
        """Capture what decoding can need with the present tree, before the first request."""
        if self._chain_length is None:
            return []
        with torch.inference_mode():
            longest = self._chain_length
            fixed = [REST, Choice(longest, follows=True)] if longest else [REST]
            return self._prepared.warm_up(fixed if self._lengths is None else self._lengths.choices)

    def explain(self) -> dict[str, object]:
        """Say what the last step drafted, and what each choice would have given."""
        told = None if self._lengths is None else self._lengths.last
        if told is None:
            return super().explain()
        return {
            "chosen": str(told.chosen),
            "tokens_a_second": {str(choice): round(rate, 1) for choice, rate in told.rates.items()},
            "chances": [round(chance, 3) for chance in told.chances],
        }

    def costs(self, num_decoding: int) -> StepCosts | None:
        """Return what a step of so many decoding rows costs, as it was measured at the start."""
        if self._chain_length is None or not self._places:
            return None
        longest = max(len(self._rows[number].tokens) for number in self._places)
        max_keys = self._prepared.max_keys(longest + 2 * (self._chain_length + 1))
        return self._prepared.costs(StepKind(self._prepared.num_rows(num_decoding), self._chain_length, max_keys))

    def submit(self, step: StepInput) -> None:
        """Launch the step."""
        with torch.inference_mode():
            self._take_in(step)
            self._simulate(step.simulated)
            self._lap = Lap(self.device)
            flight = Flight(self._lap, {work.row: place for place, work in enumerate(step.work)})
            alone: list[tuple[Row, Work]] = []
            beginning: list[tuple[Row, Work]] = []
            decoding: list[Row] = []
            for work in step.work:
                row = self._rows[work.row]
                if row.failure is not None or self._is_eager(row):
                    alone.append((row, work))
                elif row.number in self._places:
                    decoding.append(row)
                else:
                    beginning.append((row, work))
            self._launch(decoding, beginning, flight)
            self._flights.append(flight)
            flight.finished = self._run([(row, work) for row, work in alone if goes_on(row)], step)

    def collect(self) -> StepOutput:
        """Read the oldest step in flight."""
        flight = self._flights.popleft()
        flight.land()
        outputs = sorted(flight.finished, key=lambda output: flight.order[output.row])
        return self._laps.told_with(StepOutput(outputs), flight.lap)

    def _is_eager(self, row: Row) -> bool:
        return self._chain_length is None or row.joined.params.prompt_logprobs is not None

    def _take_in(self, step: StepInput) -> None:
        """Follow the changes of the batch, on the device too."""
        for left in step.left:
            self._sent.pop(left.row, None)
            self._late.discard(left.row)
            place = self._places.pop(left.row, None)
            if place is not None:
                self._state.unload(place)
                heapq.heappush(self._free, place)
        super()._take_in(step)
        added = []
        for number, pages in step.pages.items():
            if number in self._places:
                first = len(self._rows[number].pages) - len(pages)
                added += [(self._places[number], first + column, page) for column, page in enumerate(pages)]
        self._state.add_pages(added)
        for joined in step.joined:
            row = self._rows[joined.row]
            self._sent[joined.row] = row.num_committed
            if joined.computed and not self._is_eager(row):
                self._places[row.number] = heapq.heappop(self._free)
                self._state.imagine(self._load(row, row.num_committed, row.tokens[-1]))

    def _load(self, row: Row, committed: int, root: int) -> int:
        """Give a row its place in the decoding batch."""
        joined, place = row.joined, self._places[row.number]
        until = self._drafts_until(row, self._chain_length or 0)
        loaded = Loaded(committed, root, joined.seed, until, joined.row, joined.params.temperature)
        self._state.load(place, loaded, row.pages)
        return place

    def _drafts_until(self, row: Row, num_drafted: int) -> int:
        """Return the length from which a drafted token could not be emitted any more; 0 if the row never drafts."""
        if not row.joined.speculate or not num_drafted or row.number in self._late:
            return 0
        return min(row.joined.num_prompt + row.joined.params.max_tokens - 2, self._max_context - num_drafted)

    def _launch(self, decoding: Sequence[Row], beginning: Sequence[tuple[Row, Work]], flight: Flight) -> None:
        """Launch a step of the decoding batch, and parts of prompts, in one pass of the target where that can be."""
        prepared, lap = self._prepared, flight.lap
        kind = self._kind(decoding) if decoding else None  # before rows that begin have places
        ending = [row for row, work in beginning if work.emits]
        masks = self._first_masks(ending)
        parts = self._parts(beginning, masks)
        size = prepared.padded_size(parts)
        mixed = kind is not None and size is not None and prepared.mixes(kind)
        words_MW = None if masks is None else masks.words_MW
        if size is not None:
            prepared.prompts(size).prompts.fill(parts, words_MW)
        if kind is not None:
            if not mixed:
                lap.begin_pass(decoding)
            self._decode(decoding, kind, size if mixed else None, flight)
        if parts:
            lap.mark("prefill")
            for (row, _), part in zip(beginning, parts, strict=True):
                if part.place is not None:
                    self._load(row, part.end, 0)
            if size is None:
                flight.first = prepared.as_they_come.run(parts, words_MW)
            else:
                if not mixed:
                    prepared.prompts(size).compute()
                flight.first = prepared.prompts(size).finish(ends=bool(ending))
            flight.parts = list(beginning)
            if masks is not None:
                flight.unmasked |= {(ending[at].number, 0): error for at, error in masks.failed.items()}
        lap.mark(None)

    def _decode(self, decoding: Sequence[Row], kind: StepKind, size: int | None, flight: Flight) -> None:
        """Launch one step of the decoding batch, with a padded prompt batch beside it if there is one."""
        launches, lap = self._prepared.step(kind), flight.lap
        verify = launches.verify if size is None else self._prepared.mixed(kind, size)
        lap.mark("draft" if kind.num_drafted else "verify")
        launches.draft()
        followed = [row for row in decoding if row.grammar is not None]
        chain = Arrival((launches.step.chain_RN,)) if followed else None
        lap.mark("verify" if size is None else "mixed")
        verify()
        if followed:
            lap.mark(None)  # masks are made meanwhile, and may be late
        flight.unmasked = self._mask(followed, chain, kind.num_drafted)
        lap.mark("verify")
        launches.choose()
        length = kind.num_drafted
        until = self._chain_length or 0 if length else 0
        flight.rows = [Decoding(row, self._places[row.number], self._drafts_until(row, until)) for row in decoding]
        flight.num_drafted = length
        flight.learn = None if self._lengths is None else self._lengths.learn
        flight.out = Arrival((launches.step.out_RE,))
        if any(row.joined.params.logprobs is not None for row in decoding):
            assert launches.step.sampled is not None, "it was chosen when it was made ready"
            flight.logprobs = download(launches.step.sampled)
        if launches.extend is not None:
            lap.mark("draft")
            launches.extend()

    def _kind(self, decoding: Sequence[Row]) -> StepKind:
        """Return the kind of step that fits the batch; rows far back move up where a smaller one would do."""
        size = self._prepared.num_rows(len(self._places))
        for number, place in list(self._places.items()):
            if place >= size:
                self._places[number] = heapq.heappop(self._free)
                self._state.move(place, self._places[number])
                heapq.heappush(self._free, place)
        assert self._chain_length is not None
        ahead = (len(self._flights) + 1) * (self._chain_length + 1)
        longest = max(len(self._rows[number].tokens) for number in self._places) + ahead
        kind = self._chosen(decoding, StepKind(size, 0, self._prepared.max_keys(longest)))
        if not kind.extends:
            for row in decoding:
                if row.joined.speculate and self._chain_length and row.number not in self._late:
                    self._late.add(row.number)
                    self._state.stop_drafting(self._places[row.number])
        return kind

    def _chosen(self, decoding: Sequence[Row], plain: StepKind) -> StepKind:
        """Return the step with as many drafted tokens as pay; `plain` has none."""
        drafting = [row for row in decoding if row.joined.speculate]
        whole = replace(plain, num_drafted=self._chain_length or 0)
        if not drafting or self._lengths is None:
            return whole if drafting else plain
        kinds = {
            choice: replace(plain, num_drafted=choice.length, follows=choice.follows and not choice.length)
            for choice in self._lengths.choices
        }
        measured = {choice: self._prepared.seconds(kind) for choice, kind in kinds.items()}
        seconds = {choice: taken for choice, taken in measured.items() if taken is not None}
        if not seconds:  # nothing is measured where nothing is captured
            return whole
        fresh = sum(row.number not in self._late for row in drafting)
        return kinds[self._lengths.choose(len(decoding), fresh, seconds)]

    def _simulate(self, rates: tuple[float, ...]) -> None:
        """Let rates decide what is kept of drafts, or the target again."""
        if rates != self._simulated:
            self._simulated = rates
            most = len(self._buffers.thresholds_K)
            values = [*thresholds(rates)[:most], *[0 if rates else -1] * (most - len(rates))]
            upload(values, self._buffers.thresholds_K)

    def _mask(
        self, followed: Sequence[Row], chain: Arrival | None, num_drafted: int
    ) -> dict[tuple[int, int], Exception]:
        """Bring up what grammars leave at the drafted nodes, made while the target's pass runs; return what failed."""
        row_L = self._buffers.masks.row_L
        if not followed or chain is None:
            if self._masked:
                row_L.fill_(-1)
                self._masked = False
            return {}
        for flight in self._flights:  # grammars stand where the last step left them
            flight.land()
        (chain_RN,) = chain.wait()
        rows = chain_RN.tolist()
        nodes = list(range(num_drafted + 1))
        trees = [
            Tree(rows[self._places[row.number]], [n - 1 for n in nodes], nodes, [-1] * len(nodes)) for row in followed
        ]
        masks = self._chooser.masks(followed, trees)
        assert masks is not None, "these rows have grammars"
        at = torch.full((len(row_L),), -1, dtype=torch.int64)
        for index, row in enumerate(followed):
            first = self._places[row.number] * len(nodes)
            at[first : first + len(nodes)] = torch.tensor(masks.row_L[index * len(nodes) : (index + 1) * len(nodes)])
        upload(masks.words_MW, self._buffers.masks.words_MW[: len(masks.words_MW)])
        upload(at, row_L)
        self._masked = True
        return {(followed[node // len(nodes)].number, node % len(nodes)): error for node, error in masks.failed.items()}

    def _parts(self, beginning: Sequence[tuple[Row, Work]], masks: NodeMasks | None) -> list[Part]:
        """Return the parts of prompts to compute; rows whose text ends with theirs have a place from now on."""
        parts: list[Part] = []
        seen = 0
        for row, work in beginning:
            start = self._sent[row.number]
            end = self._sent[row.number] = start + work.num_tokens
            place, mask = None, -1
            if work.emits:
                place = self._places[row.number] = heapq.heappop(self._free)
                mask = -1 if masks is None else masks.row_L[seen]
                seen += 1
            tokens, followers = row.tokens[start:end], row.tokens[start + 1 : end + 1]
            number, num_prompt = row.number, row.joined.num_prompt
            parts.append(Part(tokens, followers, start, row.pages, number, num_prompt, place, mask))
        return parts

    def _first_masks(self, ending: Sequence[Row]) -> NodeMasks | None:
        """Return what grammars leave after whole prompts."""
        trees = [Tree([row.tokens[-1]], [-1], [0], [-1]) for row in ending]
        return self._chooser.masks(ending, trees)


@torch.no_grad()
def _exchange_weights(one: Eagle3Draft, other: Eagle3Draft) -> None:
    """Give each of two drafts the other's numbers; tables and heads that are the target's own stay."""
    mine, others = _numbers(one), _numbers(other)
    assert [x.shape for x in mine] == [x.shape for x in others], "`DraftShelf` looked"
    for x, y in zip(mine, others, strict=True):
        if x.data_ptr() != y.data_ptr():
            kept = x.clone()
            x.copy_(y)
            y.copy_(kept)


def _numbers(draft: Eagle3Draft) -> list[Tensor]:
    """Return all tensors that make a draft's guesses."""
    packed = [module.packed for module in draft.modules() if isinstance(module, Linear) and module.packed is not None]
    codes = [x for weight in packed for run in weight.runs for x in (run.codes, *run.scales.values())]
    return [draft.token_ids_V, *(parameter.data for parameter in draft.parameters()), *codes]
