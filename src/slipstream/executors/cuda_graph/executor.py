"""The captured executor: decoding rows live on the device, a step is a few graph launches, the host is one step behind.

A row joins the batch when its prompt's last part has been computed and leaves it when its request does; nobody else's
state moves. Parts of prompts run between two steps. Rows that need what graphs cannot do (log probabilities of a
prompt) run eagerly, alone.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from slipstream.executors.choice import NodeMasks
from slipstream.executors.cuda_graph.exchange import exchange_weights
from slipstream.executors.cuda_graph.flight import Decoding, Flight, goes_on
from slipstream.executors.cuda_graph.menu import Decoders, StepMenu
from slipstream.executors.cuda_graph.prepared import Prepared
from slipstream.executors.cuda_graph.prompts import Part
from slipstream.executors.cuda_graph.state import MOST_LATE, Loaded, StepModels
from slipstream.executors.cuda_graph.step import Step, StepBuffers, StepKind
from slipstream.executors.cuda_graph.transfer import Arrival, download, upload
from slipstream.executors.cuda_graph.tree_step import TreeStep
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.interface import StepCosts, StepInput, StepOutput, Work
from slipstream.executors.rows import Row
from slipstream.executors.runner import Runner
from slipstream.executors.stopwatch import Lap
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.speculation.borrowed import Borrowers
from slipstream.speculation.drafter import Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter, Exchanged
from slipstream.speculation.simulate import thresholds
from slipstream.speculation.tree import MAX_NODES, Tree, TreeShape

_FEW_ROWS = 8
"""Rows among which one that leaves has the draft follow its text first, for requests that begin with it."""


class GraphExecutor(EagerExecutor):
    """Runs decoding rows ahead of the host; one step at work, one being read."""

    def __init__(self, runner: Runner, drafter: Drafter, num_rows: int, max_context: int) -> None:
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
        most_nodes = 1 if eagle is None else MAX_NODES
        self._buffers = StepBuffers.allocate(self._models, self._chooser.state, max_context, most_nodes)
        self._state = self._buffers.state
        self._prepared = Prepared(self._models, self._buffers, max_context)
        self._simulated: tuple[float, ...] = ()
        self._flights: deque[Flight] = deque()
        self._places: dict[int, int] = {}
        self._free = list(range(num_rows))
        self._sent: dict[int, int] = {}  # tokens of each row whose computing was begun
        self._masked = False
        self._menu = StepMenu(self._shapes, self._prepared)
        self._late = 0  # steps without drafts that the draft has not followed

    @staticmethod
    def supports(runner: Runner, drafter: Drafter) -> bool:
        """Tell whether steps can run so: the target is whole on one device, and the drafter a draft."""
        return runner.model.ranks.size == 1 and isinstance(drafter, NoDrafter | Eagle3Drafter)

    @property
    def lookahead(self) -> int:
        """One step."""
        return 1

    @property
    def in_flight(self) -> int:
        """Steps not collected yet."""
        return len(self._flights)

    @property
    def _shapes(self) -> Sequence[TreeShape]:
        """What rows may be drafted; nothing without a draft."""
        return () if self._eagle is None else self._eagle.menu

    @property
    def _extra_slots(self) -> int:
        """Slots past a row's root that a step writes."""
        return max((max(shape.num_nodes - 1, shape.scratch) for shape in self._shapes), default=0)

    def reshape(self, shape: TreeShape) -> bool:
        """Draft trees of another shape; of what rows have on the device, only how far they draft depends on it."""
        self._drafter.reshape(shape)
        for number, place in self._places.items():
            self._state.draft_until(place, self._drafts_until(self._rows[number], self._extra_slots))
        self._menu = StepMenu(self._shapes, self._prepared)
        return False

    def swap_draft(self, draft: Eagle3Draft, borrowers: Borrowers | None) -> Exchanged:
        """Exchange the weights in place, behind the steps in flight: graphs hold the tensors of the draft in use."""
        assert self._eagle is not None, "`DraftShelf` looked"
        exchange_weights(self._eagle.draft, draft)
        return self._eagle.exchange(self._eagle.draft, borrowers)._replace(draft=draft)

    def reset(self) -> None:
        """Forget every row and every step in flight."""
        super().reset()
        self._flights.clear()
        with torch.inference_mode():
            for place in self._places.values():
                self._state.unload(place)
        self._free = list(range(len(self._state.active_R) - 1))
        self._places.clear()
        self._sent.clear()
        self._late = 0

    def warm_up(self) -> list[str]:
        """Capture what decoding can need with the present trees, before the first request."""
        with torch.inference_mode():
            return self._prepared.warm_up(self._menu.kinds)

    def explain(self) -> dict[str, object]:
        """Say what the last step drafted, and what each choice would have given."""
        return super().explain() if self._menu.controller is None else self._menu.controller.explain()

    def costs(self, num_decoding: int) -> StepCosts | None:
        """Return what a step of so many decoding rows costs, as it was measured at the start."""
        if not self._places:
            return None
        plain = self._menu.beside_prompts(self._plain(self._prepared.num_rows(num_decoding)))
        return self._prepared.costs(self._menu.usual(plain))

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

    @staticmethod
    def _is_eager(row: Row) -> bool:
        return row.joined.params.prompt_logprobs is not None

    def _take_in(self, step: StepInput) -> None:
        """Follow the changes of the batch, on the device too."""
        leaves_keys = any(left.num_reusable for left in step.left if left.row in self._places)
        if self._late and leaves_keys and len(self._places) <= _FEW_ROWS:
            self._catch_up(self._prepared.num_rows(max(self._places.values()) + 1))
        for left in step.left:
            self._sent.pop(left.row, None)
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
        if step.joined and self._menu.controller is not None:
            self._menu.controller.begin_text(len(self._rows))
        for joined in step.joined:
            row = self._rows[joined.row]
            self._sent[joined.row] = row.num_committed
            if joined.computed and not self._is_eager(row):
                self._places[row.number] = heapq.heappop(self._free)
                self._state.imagine(self._load(row, row.num_committed, row.tokens[-1]))

    def _load(self, row: Row, committed: int, root: int) -> int:
        """Give a row its place in the decoding batch."""
        joined, place = row.joined, self._places[row.number]
        until = self._drafts_until(row, self._extra_slots)
        loaded = Loaded(committed, root, joined.seed, until, joined.row, joined.params.temperature)
        self._state.load(place, loaded, row.pages)
        return place

    def _drafts_until(self, row: Row, extra_slots: int) -> int:
        """Return the length from which a drafted token could not be emitted any more; 0 if the row never drafts."""
        if not row.joined.speculate or not extra_slots:
            return 0
        return min(row.joined.num_prompt + row.joined.params.max_tokens - 2, self._max_context - extra_slots)

    def _launch(self, decoding: Sequence[Row], beginning: Sequence[tuple[Row, Work]], flight: Flight) -> None:
        """Launch a step of the decoding batch, and parts of prompts, in one pass of the target where that can be."""
        prepared, lap = self._prepared, flight.lap
        # Before rows that begin have places.
        kind = self._kind(decoding, joined=bool(beginning)) if decoding else None
        ending = [row for row, work in beginning if work.emits]
        masks = self._first_masks(ending)
        parts = self._parts(beginning, masks)
        size = prepared.padded_size(parts)
        mixed = kind is not None and size is not None and self._menu.joins(kind)
        words_MW = None if masks is None else masks.words_MW
        if size is not None:
            prepared.prompts(size).prompts.fill(parts, words_MW)
        if kind is not None:
            if not mixed:
                lap.begin_pass(decoding, None if self._is_late(kind) else partial(self._menu.learn_seconds, kind))
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
        if self._is_late(kind):
            lap.mark("draft")
            self._catch_up(kind.num_rows)
        lap.mark("draft" if kind.num_drafted else "verify")
        launches.draft()
        followed = [row for row in decoding if row.grammar is not None]
        drafted = Arrival(launches.step.drafted) if followed and kind.num_drafted else None
        lap.mark("verify" if size is None else "mixed")
        verify()
        if followed:
            lap.mark(None)  # masks are made meanwhile, and may be late
        flight.unmasked = self._mask(followed, drafted, launches.step)
        lap.mark("verify")
        launches.choose()
        self._late += kind.notes and any(row.joined.speculate for row in decoding)
        extra = self._extra_slots if kind.num_drafted else 0
        flight.rows = [Decoding(row, self._places[row.number], self._drafts_until(row, extra)) for row in decoding]
        flight.kind, flight.learn = kind, partial(self._menu.learn, kind)
        flight.out = Arrival((launches.step.out_RE,))
        if any(row.joined.params.logprobs is not None for row in decoding):
            assert launches.step.sampled is not None, "it was chosen when it was made ready"
            flight.logprobs = download(launches.step.sampled)
        if kind.num_drafted:
            lap.mark("draft")
            launches.extend()

    def _kind(self, decoding: Sequence[Row], *, joined: bool) -> StepKind:
        """Return the kind of step that fits the batch; rows far back move up where a smaller one would do.

        Args:
            joined: prompts are to be computed in the same step.
        """
        size = self._prepared.num_rows(len(self._places))
        for number, place in list(self._places.items()):
            if place >= size:
                self._places[number] = heapq.heappop(self._free)
                self._state.move(place, self._places[number])
                heapq.heappush(self._free, place)
        drafting = sum(row.joined.speculate for row in decoding)
        num_keys = sum(len(row.tokens) for row in decoding) / len(decoding)
        plain = self._menu.beside_prompts(self._plain(size)) if joined else self._plain(size)
        return self._menu.next(plain, Decoders(len(decoding), drafting, num_keys), joined=joined)

    def _plain(self, num_rows: int) -> StepKind:
        """Return the step without drafts that so many places may take next, whatever is in flight."""
        unread = sum(flight.most_given for flight in self._flights)  # perhaps of a larger shape than today's
        ahead = unread + self._extra_slots + 1 + MOST_LATE
        longest = max(len(self._rows[number].tokens) for number in self._places) + ahead
        return self._menu.plain(num_rows, self._prepared.max_keys(longest))

    def _is_late(self, kind: StepKind) -> bool:
        """Tell whether the draft must follow the steps that had none before such a step."""
        return self._late > 0 and (kind.num_drafted > 0 or self._late == MOST_LATE)

    def _catch_up(self, num_rows: int) -> None:
        """Let the draft of the first so many places follow the steps that had none."""
        self._prepared.catch_up(num_rows)()
        self._late = 0

    def _simulate(self, rates: tuple[float, ...]) -> None:
        """Let rates decide what is kept of drafts, or the target again."""
        if rates != self._simulated:
            self._simulated = rates
            most = len(self._buffers.thresholds_K)
            values = [*thresholds(rates)[:most], *[0 if rates else -1] * (most - len(rates))]
            upload(values, self._buffers.thresholds_K)

    def _mask(
        self, followed: Sequence[Row], drafted: Arrival | None, step: Step | TreeStep
    ) -> dict[tuple[int, int], Exception]:
        """Bring up what grammars leave at the drafted nodes, made while the target's pass runs; return what failed."""
        row_L = self._buffers.masks.row_L
        if not followed:
            if self._masked:
                row_L.fill_(-1)
                self._masked = False
            return {}
        for flight in self._flights:  # grammars stand where the last step left them
            flight.land()
        come = None if drafted is None else drafted.wait()
        trees = [_lone_root(row) if come is None else step.tree(come, self._places[row.number]) for row in followed]
        count = step.kind.num_drafted + 1
        masks = self._chooser.masks(followed, trees)
        assert masks is not None, "these rows have grammars"
        at = torch.full((len(row_L),), -1, dtype=torch.int64)
        for index, row in enumerate(followed):
            first = self._places[row.number] * count
            at[first : first + count] = torch.tensor(masks.row_L[index * count : (index + 1) * count])
        upload(masks.words_MW, self._buffers.masks.words_MW[: len(masks.words_MW)])
        upload(at, row_L)
        self._masked = True
        return {(followed[node // count].number, node % count): error for node, error in masks.failed.items()}

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
        return self._chooser.masks(ending, [_lone_root(row) for row in ending])


def _lone_root(row: Row) -> Tree:
    """Return the tree of a row for which nothing is drafted."""
    return Tree([row.tokens[-1]], [-1], [0], [-1])
