"""The embedded model on a GPU: speed with real acceptance, and the same tokens with and without the draft."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_measure import Measured, device_step_ms
from gpu_models import TINY, engine_of, random_draft, random_target, read_bundle
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.kernels import Ops
from slipstream.kernels.reference.noise import gumbel
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target
from slipstream.speculation.sampling import MAX_TOP_LOGPROBS, SamplingParams

_BATCH = 32
_WARM_STEPS = 6


@dataclass(frozen=True)
class EmbeddedPair:
    """A target with its draft, questions for it, and the tokens that end an answer."""

    target: Target
    draft: Eagle3Draft
    prompts: list[list[int]]
    end_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Lossless:
    """How many of the answers are the same with and without the draft, and where the first difference lies."""

    count: int
    identical: int
    seconds: float
    note: str


def embedded_pair(bundle: Path | None, device: torch.device, tiny: bool) -> EmbeddedPair:
    """Read the bundle, or make tiny random models to try the script itself."""
    if tiny:
        target = random_target(TINY, torch.float32, device)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, TINY.vocab_size, (4, 9), generator=generator).tolist()
        return EmbeddedPair(target, random_draft(target, 61), prompts, ())
    if bundle is None:
        raise SystemExit("The embedded model comes from --bundle FILE; make one with benchmarks/gpu_bundle.py.")
    read, target, draft = read_bundle(bundle, torch.bfloat16, device)
    return EmbeddedPair(target, draft, read.prompts, read.end_tokens)


def speed(
    pair: EmbeddedPair, draft: Eagle3Draft | None, ops: Ops, batch: int, tokens: int, num_drafted: int
) -> Measured:
    """Decode a batch of prompts; the time is that between the last prompt's end and the first answer's."""
    engine = _engine(pair, draft, ops, batch, tokens, num_drafted)
    device = pair.target.embed_tokens.device
    prompts = [pair.prompts[index % len(pair.prompts)] for index in range(batch)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for _ in range(2):  # the first time compiles and captures
        for index, prompt in enumerate(prompts):
            engine.add(prompt, params, index)
        measured = _timed(engine, device)
        for _ in range(2 * tokens):
            if not engine.has_work:
                break
            engine.step()
    return measured


def _timed(engine: Engine, device: torch.device) -> Measured:
    stats = engine.stats
    assert isinstance(engine.executor, GraphExecutor), "the benchmark measures captured steps"
    warm = 0
    while warm < _WARM_STEPS:  # the prompts, then a few steps
        engine.step()
        warm += engine.num_waiting == 0
    before = dict(stats.phase_seconds)
    emitted, started, steps, done = stats.acceptance.emitted, time.perf_counter(), 0, False
    while not done:
        done = any(emission.finish_reason is not None for emission in engine.step())
        steps += 1
    seconds = time.perf_counter() - started
    emitted = stats.acceptance.emitted - emitted
    if device.type == "cuda":
        torch.cuda.synchronize()
    device_ms = device_step_ms(engine, before, steps) if device.type == "cuda" else None
    return Measured(seconds / steps * 1e3, emitted / seconds, emitted / steps, device_ms)


def lossless(pair: EmbeddedPair, ops: Ops, temperature: float, count: int, tokens: int, num_drafted: int) -> Lossless:
    """Answer questions with and without the draft, and compare."""
    prompts = [pair.prompts[index % len(pair.prompts)] for index in range(count)]
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    started = time.perf_counter()
    answers = []
    for draft in (None, pair.draft):
        engine = _engine(pair, draft, ops, _BATCH, tokens, num_drafted if draft is not None else 0)
        answers.append(_answers(engine, prompts, params, pair.end_tokens))
        if draft is not None:
            length = engine.stats.acceptance.acceptance_length
    seconds = time.perf_counter() - started
    different = [index for index, (one, two) in enumerate(zip(*answers, strict=True)) if one != two]
    note = f"acceptance length {length:.3f}"
    if different:
        first = different[0]
        note += "; " + _difference(pair, ops, prompts[first], (answers[0][first], answers[1][first], first), params)
    return Lossless(count, count - len(different), seconds, note)


def _answers(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, end_tokens: tuple[int, ...]
) -> list[list[int]]:
    ids = {engine.add(prompt, params, index, end_tokens): index for index, prompt in enumerate(prompts)}
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for emission in engine.step():
            answers[ids[emission.request_id]] += [token.token_id for token in emission.tokens]
    return answers


def _difference(
    pair: EmbeddedPair, ops: Ops, prompt: list[int], found: tuple[list[int], list[int], int], params: SamplingParams
) -> str:
    """Say where two answers part, and how far apart the target's scores of the two tokens are there."""
    plain, drafted, seed = found
    at = next(
        (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), min(len(plain), len(drafted))
    )
    where = f"question {seed} parts at token {at}"
    if at >= min(len(plain), len(drafted)):
        return f"{where}, where one answer ends"
    engine = _engine(pair, None, ops, 1, len(plain) + 2, 0)
    engine.add([*prompt, *plain[:at]], SamplingParams(max_tokens=1, logprobs=MAX_TOP_LOGPROBS), 0)
    found_tokens = []
    while engine.has_work:
        found_tokens += [token for emission in engine.step() for token in emission.tokens]
    (token,) = found_tokens
    assert token.logprob is not None
    known = dict(token.logprob.top)
    one, two = plain[at], drafted[at]
    if one not in known or two not in known:
        return f"{where}: {one} and {two}, not both among the {MAX_TOP_LOGPROBS} likeliest"
    margin = known[one] - known[two]
    if params.temperature > 0:
        position = torch.tensor(len(prompt) + at)
        noise = gumbel(torch.tensor([seed, seed]), position.expand(2), torch.tensor([one, two]))
        margin = margin / params.temperature + float(noise[0] - noise[1])
    return f"{where}: {one} without and {two} with the draft; their scores differ by {margin:.2e}"


def _engine(
    pair: EmbeddedPair, draft: Eagle3Draft | None, ops: Ops, batch: int, tokens: int, num_drafted: int
) -> Engine:
    longest = max(len(prompt) for prompt in pair.prompts) + tokens + 4 * (num_drafted + 1)
    config = EngineConfig(
        max_context=longest,
        num_pages=batch * -(-(longest + num_drafted) // 16),
        max_requests=batch,
        max_batch_tokens=2048,
        prefix_cache=False,
        cuda_graphs="on",
    )
    return engine_of(pair.target, draft, ops, config, num_drafted)
