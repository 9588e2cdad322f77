"""Decoding rounds in one call, where the kernels have one: between two prompts a step is little else.

A round does what an ordinary step does when every planned request has one token to compute and wants nothing that
looks at its own text or at logits. Tokens, statistics and keys are the same; only the Python between the parts is
gone, which on a CPU takes as long as a third of the pass.
"""

import functools
from collections.abc import Mapping, Sequence

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.mirror import LeadingRunner
from slipstream.engine.output import Emission
from slipstream.engine.request import Request
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Scheduled, Scheduler
from slipstream.engine.session import Session
from slipstream.engine.stats import EngineStats
from slipstream.kernels import Borrowed, Follower, RoundModels, RoundOps, RoundResult, RoundStart
from slipstream.speculation.controller import Reach
from slipstream.speculation.drafter import Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.tree import Tree

_NO_LOGITS: dict[int, torch.Tensor] = {}


class Rounds:
    """Runs plans that only decode."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        config: EngineConfig,
        scheduler: Scheduler,
        sessions: Mapping[int, Session],
    ) -> None:
        eagle = drafter if isinstance(drafter, Eagle3Drafter) else None
        self._models = RoundModels(
            runner.model,
            runner.kv,
            runner.captured_layers,
            None if eagle is None else eagle.draft,
            None if eagle is None else eagle.kv,
        )
        assert isinstance(runner.ops, RoundOps), "`rounds_over` looked"
        self._run_round = runner.ops.run_round
        self._able = True  # until the kernels say that they cannot read these models
        self._eagle, self._config = eagle, config
        self._scheduler, self._sessions = scheduler, sessions

    def run(self, plan: Sequence[Scheduled], stats: EngineStats) -> list[Emission] | None:
        """Run a plan and return what it emits; None if it takes an ordinary step."""
        depth = self._chain_length()
        if not self._able or depth is None or not plan or not all(self._decodes(work) for work in plan):
            return None
        result = self._run(plan, depth)
        if result is None:
            return None
        stats.phase_seconds["draft"] += result.seconds[0] + result.seconds[2]
        stats.phase_seconds["verify"] += result.seconds[1]
        return [
            self._commit(work, tokens, checked, stats)
            for work, tokens, checked in zip(plan, result.tokens, result.checked, strict=True)
        ]

    def _chain_length(self) -> int | None:
        """Return how long the drafter's chains are, 0 without a draft; None if it grows trees."""
        if self._eagle is None:
            return 0
        shape = self._eagle.shape
        return shape.num_nodes - 1 if shape.width == 1 and not shape.paths else None

    def _decodes(self, work: Scheduled) -> bool:
        """Tell whether a request has one token to compute and wants nothing but the next ones."""
        request, params = work.request, work.request.params
        if work.num_tokens != 1 or not work.emits or request.num_output == 0:
            return False
        if params.shapes_logits or params.logprobs is not None:
            return False
        if self._eagle is None or not request.speculate:
            return True
        return self._eagle.knows(request.request_id, len(request.tokens) - 1)

    def _run(self, plan: Sequence[Scheduled], depth: int) -> RoundResult | None:
        requests = [work.request for work in plan]
        followers: list[Follower | None] = [None] * len(requests)
        rows = [] if self._eagle is None else [row for row, request in enumerate(requests) if request.speculate]
        reach = Reach(0)
        if self._eagle is not None and rows:
            found, reach = self._eagle.begin_round({requests[row].request_id: requests[row].pages for row in rows})
            for row, follower in zip(rows, found, strict=True):
                followers[row] = follower
        limits = [min(reach.depth, _num_wanted(work.request) - 1) if work.drafts else 0 for work in plan]
        start = RoundStart(
            pages=[request.pages for request in requests],
            roots=[request.tokens[-1] for request in requests],
            lengths=[len(request.tokens) - 1 for request in requests],
            temperatures=[request.params.temperature for request in requests],
            seeds=[request.seed for request in requests],
            limits=limits,
            followers=followers,
            follow=reach.follows,
            borrowed=self._borrowed(requests, limits),
        )
        result = self._run_round(self._models, start, depth, reach.cut)
        self._able = result is not None
        if result is not None and self._eagle is not None and rows:
            own = result if len(rows) == len(requests) else result.of(rows)
            self._eagle.end_round([requests[row].request_id for row in rows], own)
        return result

    def _borrowed(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Borrowed | None]:
        """Return what the requests that may draft have borrowed; nothing is looked up while drafting rests."""
        eagle = self._eagle
        if eagle is None or not eagle.borrows or not any(limits):
            return []
        return [
            eagle.borrowed(request.request_id, request.tokens) if limit else None
            for request, limit in zip(requests, limits, strict=True)
        ]

    def _commit(self, work: Scheduled, tokens: Sequence[int], checked: int, stats: EngineStats) -> Emission:
        """Hand out a request's tokens; those past its end are dropped, their keys behind its own."""
        request = work.request
        room = self._config.max_context - len(request.tokens)
        path = [(token, node) for node, token in enumerate(tokens)]
        session = self._sessions[request.request_id]
        emission = session.emit(_chain(checked), path, _NO_LOGITS, room, stats.acceptance)
        emitted = [token.token_id for token in emission.tokens]
        self._scheduler.commit(request, len(emitted), emitted)
        return emission


def rounds_over(
    runner: Runner | LeadingRunner,
    drafter: Drafter,
    config: EngineConfig,
    scheduler: Scheduler,
    sessions: Mapping[int, Session],
) -> Rounds | None:
    """Return what runs rounds; None where steps never may: cycles, a target in parts, another drafter or kernels."""
    if config.runs_cycles(runner.device.type):
        return None
    if not isinstance(runner, Runner) or not isinstance(runner.ops, RoundOps):
        return None
    if not isinstance(drafter, NoDrafter | Eagle3Drafter):
        return None
    return Rounds(runner, drafter, config, scheduler, sessions)


def _num_wanted(request: Request) -> int:
    return request.params.max_tokens - request.num_output


@functools.cache
def _chain(length: int) -> Tree:
    """Return a chain of drafted tokens for the statistics, which ask only for its shape."""
    nodes = list(range(length + 1))
    return Tree([0] * len(nodes), [node - 1 for node in nodes], nodes, [-1] * len(nodes))
