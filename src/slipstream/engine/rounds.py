"""Decoding rounds in one call, where the kernels have one: between two prompts a step is little else.

A round does what an ordinary step does when every planned request has one token to compute and wants nothing that
looks at its own text or at logits. Tokens, statistics and keys are the same; only the Python between the parts is
gone, which on a CPU takes as long as a third of the pass. With patience, a call runs several rounds, until an answer
ends: then the Python between rounds is gone too.
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
from slipstream.kernels import Borrowed, Follower, Hurry, Onward, RoundModels, RoundOps, RoundResult, RoundStart
from slipstream.speculation.controller import Reach
from slipstream.speculation.drafter import Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.tree import Tree

_NO_LOGITS: dict[int, torch.Tensor] = {}
_MOST_ROUNDS = 16  # of a call


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
        self._run_rounds = runner.ops.run_rounds
        self._hurry = Hurry()
        self._round_s = 0.0  # what the last one took
        self._able = True  # until the kernels say that they cannot read these models
        self._eagle, self._config = eagle, config
        self._scheduler, self._sessions = scheduler, sessions

    def hurry(self) -> None:
        """Let a call under way end with the round it is at; any thread may ask."""
        self._hurry.ask()

    def run(self, plan: Sequence[Scheduled], patience_s: float, stats: EngineStats) -> list[Emission] | None:
        """Run a plan, and go on for as long as there is patience; return what came of it.

        None if the plan takes an ordinary step.
        """
        depth = self._chain_length()
        if not self._able or depth is None or not plan or not all(self._decodes(work) for work in plan):
            return None
        results = self._run(plan, depth, patience_s)
        self._hurry.take_back()
        if results is None:
            return None
        for result in results:
            stats.phase_seconds["draft"] += result.seconds[0] + result.seconds[2]
            stats.phase_seconds["verify"] += result.seconds[1]
        self._round_s = sum(results[-1].seconds)
        stats.steps += len(results) - 1
        return [self._commit(work, row, results, stats) for row, work in enumerate(plan)]

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

    def _run(self, plan: Sequence[Scheduled], depth: int, patience_s: float) -> list[RoundResult] | None:
        requests = [work.request for work in plan]
        followers: list[Follower | None] = [None] * len(requests)
        rows = [] if self._eagle is None else [row for row, request in enumerate(requests) if request.speculate]
        reach = Reach(0, passes=_MOST_ROUNDS)
        if self._eagle is not None and rows:
            found, reach = self._eagle.begin_rounds({requests[row].request_id: requests[row].pages for row in rows})
            for row, follower in zip(rows, found, strict=True):
                followers[row] = follower
        wanted = [self._scheduler.num_wanted(request) for request in requests]
        limits = [min(reach.depth, most - 1) if work.drafts else 0 for work, most in zip(plan, wanted, strict=True)]
        rounds = self._num_rounds(reach, max(limits), patience_s)
        ends = [request.end_tokens for request in requests]
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
            onward=Onward(rounds, patience_s, wanted, ends, self._hurry) if rounds > 1 else None,
        )
        results = self._run_rounds(self._models, start, depth, reach.cut)
        self._able = results is not None
        if results is not None and self._eagle is not None and rows:
            own = results if len(rows) == len(requests) else [result.of(rows) for result in results]
            self._eagle.end_rounds([requests[row].request_id for row in rows], own)
        return results

    def _num_rounds(self, reach: Reach, most_drafted: int, patience_s: float) -> int:
        """Return how many rounds a call may run, with pages reserved for what they may emit."""
        if patience_s <= 0 or reach.passes == 1:
            return 1
        rounds = min(reach.passes, _MOST_ROUNDS, 2 + int(patience_s / max(self._round_s, patience_s / _MOST_ROUNDS)))
        return rounds if self._scheduler.reserve_answers(rounds * (1 + most_drafted), most_drafted) else 1

    def _borrowed(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Borrowed | None]:
        """Return what the requests that may draft have borrowed; nothing is looked up while drafting rests."""
        eagle = self._eagle
        if eagle is None or not eagle.borrows or not any(limits):
            return []
        return [
            eagle.borrowed(request.request_id, request.tokens) if limit else None
            for request, limit in zip(requests, limits, strict=True)
        ]

    def _commit(self, work: Scheduled, row: int, results: Sequence[RoundResult], stats: EngineStats) -> Emission:
        """Hand out a request's tokens; those past its end are dropped, their keys behind its own."""
        request = work.request
        session = self._sessions[request.request_id]
        emissions: list[Emission] = []
        for result in results:
            room = self._config.max_context - len(request.tokens)
            path = [(token, node) for node, token in enumerate(result.tokens[row])]
            emission = session.emit(_chain(result.checked[row]), path, _NO_LOGITS, room, stats.acceptance)
            emitted = [token.token_id for token in emission.tokens]
            self._scheduler.commit(request, len(emitted), emitted)
            emissions.append(emission)
            if emission.finish_reason is not None:
                break
        return emissions[0] if len(emissions) == 1 else Emission.joined(emissions)


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


@functools.cache
def _chain(length: int) -> Tree:
    """Return a chain of drafted tokens for the statistics, which ask only for its shape."""
    nodes = list(range(length + 1))
    return Tree([0] * len(nodes), [node - 1 for node in nodes], nodes, [-1] * len(nodes))
