"""The embedded model on a GPU: real prompts at real acceptance, without a draft, with one, and the same answers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_measure import Measured, phase_ms
from gpu_models import TINY, random_draft, random_target, read_bundle
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.kernels import Ops
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

_WARM_STEPS = 6
_NODES = 64  # slots beyond prompt and answer, for what a step drafts


@dataclass(frozen=True)
class EmbeddedPair:
    """A target with its draft, and prompts for it."""

    target: Target
    draft: Eagle3Draft
    prompts: list[list[int]]


def embedded_pair(bundle: Path | None, device: torch.device, tiny: bool) -> EmbeddedPair:
    """Read the bundle, or make tiny random models to try the script itself."""
    if bundle is not None:
        read, target, draft = read_bundle(bundle, torch.bfloat16, device)
        return EmbeddedPair(target, draft, read.prompts)
    if not tiny:
        raise SystemExit("The embedded model comes from --bundle FILE; make one with benchmarks/gpu_bundle.py.")
    target = random_target(TINY, torch.float32, device)
    prompts = torch.randint(0, TINY.vocab_size, (4, 9), generator=torch.Generator().manual_seed(0)).tolist()
    return EmbeddedPair(target, random_draft(target, 61), prompts)


def speed(
    pair: EmbeddedPair, ops: Ops, shape: TreeShape | None, batch: int, tokens: int, *, drafts: bool
) -> tuple[Measured, list[list[int]]]:
    """Decode a batch of prompts greedily; return what a step took, and the answers.

    The time is that between the last prompt's end and the first answer's.

    Args:
        shape: what each step drafts; None lets steps choose.
    """
    prompts = [pair.prompts[index % len(pair.prompts)] for index in range(batch)]
    longest = max(map(len, prompts)) + tokens + _NODES
    config = EngineConfig(
        max_context=longest,
        num_pages=batch * -(-(longest + _NODES) // 16),
        max_requests=batch,
        max_batch_tokens=2048,
        prefix_cache=False,
        cuda_graphs="on",
    )
    engine = build_engine(pair.target, pair.draft if drafts else None, shape, config, ops)
    assert isinstance(engine.executor, GraphExecutor), "the benchmark measures captured steps"
    if drafts and shape is None:
        engine.executor.warm_up()  # measures what kinds of steps take
    for _ in range(2):  # the first time compiles and captures
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        rows = {engine.add(prompt, params, index): index for index, prompt in enumerate(prompts)}
        answers: list[list[int]] = [[] for _ in prompts]
        measured = _timed(engine, rows, answers)
        while engine.has_work:
            _step(engine, rows, answers)
    return measured, answers


def _timed(engine: Engine, rows: Mapping[int, int], answers: list[list[int]]) -> Measured:
    stats = engine.stats
    warm = 0
    while warm < _WARM_STEPS:  # the prompts, then a few steps
        _step(engine, rows, answers)
        warm += engine.num_waiting == 0
    before = dict(stats.phase_seconds)
    emitted, started, steps = stats.acceptance.emitted, time.perf_counter(), 1
    while not _step(engine, rows, answers):
        steps += 1
    seconds = time.perf_counter() - started
    emitted = stats.acceptance.emitted - emitted
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Measured(seconds / steps * 1e3, emitted / seconds, emitted / steps, phase_ms(engine, before, steps))


def _step(engine: Engine, rows: Mapping[int, int], answers: list[list[int]]) -> bool:
    """Take a step and keep what it emits; tell whether an answer ended."""
    ended = False
    for emission in engine.step():
        if emission.error is not None:
            raise emission.error
        answers[rows[emission.request_id]] += [token.token_id for token in emission.tokens]
        ended = ended or emission.finish_reason is not None
    return ended
