"""Decoding with the host one cycle behind: the next cycle is launched before the last one's tokens are read.

Cycles take over while every running request only decodes and wants nothing that looks at its own text. Anything else
(a new prompt, a penalty, a context about to end, pages running out) lets the cycles in flight land, hands everything
back, and leaves the step to the engine's ordinary path. Tokens a cycle emitted past a request's end are dropped; they
were written behind the request's own keys, in slots it had reserved.
"""

import functools
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.cycle import CycleKind, CycleModels, CycleState
from slipstream.engine.graphs import CaptureCost, CycleLauncher, PendingOutput, key_bounds, row_buckets
from slipstream.engine.memory import weight_bytes
from slipstream.engine.output import Emission
from slipstream.engine.request import Request
from slipstream.engine.rows import Rows
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.session import Session
from slipstream.engine.stats import EngineStats
from slipstream.speculation.drafter import Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.tree import Tree

_NO_LOGITS: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class _Flight:
    """A launched cycle: what it will have emitted, and for whom."""

    output: PendingOutput
    kind: CycleKind
    rows: list[tuple[int, Request]]


class Pipeline:
    """Runs cycles ahead of the engine's bookkeeping; one at work, one being read."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        config: EngineConfig,
        scheduler: Scheduler,
        sessions: Mapping[int, Session],
    ) -> None:
        eagle = drafter if isinstance(drafter, Eagle3Drafter) else None
        models = CycleModels(
            runner.ops,
            runner.model,
            runner.kv,
            runner.captured_layers,
            None if eagle is None else eagle.draft,
            None if eagle is None else eagle.kv,
        )
        self._eagle, self._config = eagle, config
        self._scheduler, self._sessions = scheduler, sessions
        self._target_bytes = weight_bytes(models.target)
        self._draft_bytes = 0 if models.draft is None else weight_bytes(models.draft)
        num_pages = runner.kv.num_pages - 1  # the last is nobody's
        state = CycleState.allocate(models, config.max_requests, num_columns(config, num_pages))
        self._rows = Rows(state, num_pages, eagle)
        self.launcher = CycleLauncher(models, state)
        self._buckets, self._key_bounds = row_buckets(config.max_requests), key_bounds(config.max_context)
        self._flights: deque[_Flight] = deque()
        self._kind: CycleKind | None = None

    @staticmethod
    def supports(runner: Runner, drafter: Drafter) -> bool:
        """Tell whether cycles can stand in for steps: the target is whole on one device, and the drafter a draft."""
        return isinstance(runner, Runner) and isinstance(drafter, NoDrafter | Eagle3Drafter)

    def advance(self, simulated: tuple[float, ...], stats: EngineStats) -> list[Emission] | None:
        """Launch the next cycle if one may run, and read the one before; None if an ordinary step must run now."""
        if not self._scheduler.running:
            self._flights.clear()
        kind = self._next_kind(simulated)
        if kind != self._kind and not self._flights:
            self._unload()
        if kind is None and self._kind is None:
            return None
        if kind is not None and self._kind in (None, kind):
            self._launch(kind, stats)
            if len(self._flights) == 1:
                return []
        return self._land(stats)

    def warm_up(self) -> list[CaptureCost]:
        """Make ready the cycles that contexts of usual length need with the present tree; return what that took.

        Longer contexts have theirs made when the first of them comes.
        """
        assert self._kind is None, "cycles are made ready before requests come"
        length = self._chain_length()
        if length is not None:
            for num_rows in reversed(self._buckets):  # the largest first: the others then fit the pool it made
                self.launcher.prepare(CycleKind(num_rows, length, (), self._key_bounds[0]))
        return self.launcher.costs

    def reset(self) -> None:
        """Forget every row and every cycle in flight, after a failure."""
        self._flights.clear()
        self._kind = None

    def check(self) -> None:
        """Assert that rows, cycles in flight and running requests agree."""
        assert len(self._flights) <= 1, "a step leaves at most one cycle unread"
        assert self._kind is not None or not self._flights, "a cycle is in flight and no batch is loaded"
        live = {request.request_id for _, request in self._rows.live}
        running = {request.request_id for request in self._scheduler.running}
        assert self._kind is None or live == running, "the device's batch and the running requests differ"

    def _next_kind(self, simulated: tuple[float, ...]) -> CycleKind | None:
        """Return the cycle that could run next, with its pages reserved; None if only an ordinary step will do."""
        running, length = self._scheduler.running, self._chain_length()
        if not running or length is None or self._scheduler.would_admit():
            return None
        num_drafted = length if any(request.speculate for request in running) else 0
        # A cycle may be in flight unread, with up to `num_drafted` + 1 tokens; the next one's nodes follow them.
        ahead = 2 * num_drafted + 1
        if not all(self._decodes(request, ahead) for request in running):
            return None
        if not self._scheduler.reserve_ahead(ahead):
            return None
        num_rows = next(size for size in self._buckets if size >= len(running))
        longest = max(len(request.tokens) for request in running) + ahead
        max_keys = next(bound for bound in self._key_bounds if bound >= longest)
        return CycleKind(num_rows, num_drafted, simulated if num_drafted else (), max_keys)

    def _chain_length(self) -> int | None:
        """Return how long the drafter's chains are, 0 without a draft; None if it grows trees."""
        if self._eagle is None:
            return 0
        shape = self._eagle.shape
        return shape.depth if shape.width == 1 and not shape.paths and shape.is_chain else None

    def _decodes(self, request: Request, ahead: int) -> bool:
        """Tell whether a request's next tokens can come from cycles."""
        if request.num_pending != 1 or len(request.tokens) + ahead > self._config.max_context:
            return False
        params = request.params
        if params.shapes_logits or params.logprobs is not None:
            return False
        if self._kind is not None or self._eagle is None or not request.speculate:
            return True
        return self._eagle.knows(request.request_id, len(request.tokens) - 1)

    def _launch(self, kind: CycleKind, stats: EngineStats) -> None:
        if self._kind is None:
            self._rows.clear()
            self.launcher.prepare(kind)
            self._rows.load(self._scheduler.running, kind.num_drafted > 0)
            self._kind = kind
        self._rows.refresh()
        started = time.perf_counter()
        output = self.launcher.launch(kind)
        self._count_time(kind, time.perf_counter() - started, stats)
        self._flights.append(_Flight(output, kind, self._rows.live))

    def _land(self, stats: EngineStats) -> list[Emission]:
        """Read the oldest cycle in flight and hand out what it emitted."""
        flight = self._flights.popleft()
        started = time.perf_counter()
        rows = flight.output.read()
        self._count_time(flight.kind, time.perf_counter() - started, stats)
        stats.steps += 1
        emissions = []
        for row, request in flight.rows:
            session = self._sessions.get(request.request_id)
            if session is None:  # it ended, or was aborted, after this cycle was launched
                continue
            count, *tokens = rows[row]
            wanted = request.params.max_tokens - request.num_output
            drafted = flight.kind.num_drafted if request.speculate and wanted > 1 else 0
            path = [(token, node) for node, token in enumerate(tokens[:count])]
            room = self._config.max_context - len(request.tokens)
            emission = session.emit(_chain(drafted), path, _NO_LOGITS, room, stats.acceptance)
            emitted = [token.token_id for token in emission.tokens]
            self._scheduler.commit(request, len(emitted), emitted)
            emissions.append(emission)
        return emissions

    def _unload(self) -> None:
        """Leave the requests as if ordinary steps had run."""
        if self._kind is not None:
            self._rows.hand_back(self._kind.num_drafted > 0)
            self._kind = None

    def _count_time(self, kind: CycleKind, seconds: float, stats: EngineStats) -> None:
        """Share a cycle's time between its phases by the bytes of weights each reads: a graph tells only the sum."""
        draft_bytes = kind.num_drafted * self._draft_bytes
        share = draft_bytes / (draft_bytes + self._target_bytes)
        stats.phase_seconds["draft"] += seconds * share
        stats.phase_seconds["verify"] += seconds * (1 - share)


def num_columns(config: EngineConfig, num_pages: int) -> int:
    """Return how many pages one row can need."""
    return min(num_pages, config.pages_for(config.max_context)) + 1


@functools.cache
def _chain(length: int) -> Tree:
    """Return a chain of drafted tokens for the statistics, which ask only for its shape."""
    nodes = list(range(length + 1))
    return Tree([0] * len(nodes), [node - 1 for node in nodes], nodes, [-1] * len(nodes))
