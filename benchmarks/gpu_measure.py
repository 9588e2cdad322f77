"""How the GPU benchmark measures: read bandwidth, the bytes a step must read, steps through the engine."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.interface import Phase
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Linear
from slipstream.models.target import Target
from slipstream.speculation.sampling import SamplingParams


@dataclass(frozen=True)
class Measured:
    """Steps of one batch: wall time of a step, tokens of all requests per second, and a step's phases on the device."""

    step_ms: float
    tokens_per_s: float
    tokens_per_step: float
    phase_ms: dict[Phase, float]

    @property
    def host_overhead(self) -> float:
        """Share of the wall time in which the device was not at work on a step."""
        return max(0.0, 1 - sum(self.phase_ms.values()) / self.step_ms)


def read_bandwidth(device: torch.device, nbytes: int) -> float:
    """Return the bytes per second that a plain sum over `nbytes` reads, the best of torch's and a Triton kernel's."""
    numbers = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    best = min(time_ms(numbers.sum, device, 10))
    if device.type == "cuda":
        from slipstream.kernels.triton.bandwidth import read_bandwidth as by_triton  # Triton is absent on CPU machines

        return max(nbytes / best * 1e3, by_triton(device))
    return nbytes / best * 1e3


def time_ms(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the milliseconds of each repeat, by the device's own clock where it has one."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def linear_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's linear layers, the head among them: what every pass reads."""
    found = {id(m): m for m in model.modules() if isinstance(m, Linear)}
    return sum(m.weight.nbytes if m.weight is not None else m.packed.nbytes for m in found.values())


def pass_bytes(target: Target, batch: int, context: float, keys: torch.dtype | None = None) -> float:
    """Return what one pass of the target must read: its linear layers once, and every request's keys and values."""
    return linear_bytes(target) + batch * context * target.kv_shape.bytes_per_token(keys or target.embed_tokens.dtype)


def step_bytes(target: Target, draft: Eagle3Draft, batch: int, context: float, num_drafted: int) -> float:
    """Return what a step must read: one pass of the target, `num_drafted` of the draft, its fusing layer once."""
    fuse = linear_bytes(draft.fc)
    draft_kv = batch * context * draft.kv_shape.bytes_per_token(draft.embed_tokens.dtype)
    return pass_bytes(target, batch, context) + fuse + num_drafted * (linear_bytes(draft) - fuse + draft_kv)


def measure_steps(engine: Engine, device: torch.device, steps: int, warm: int) -> Measured:
    """Time steps of an engine whose requests are all decoding and will not end meanwhile."""
    for _ in range(warm):
        engine.step()
    assert isinstance(engine.executor, GraphExecutor), "the benchmark measures captured steps"
    emitted = engine.stats.acceptance.emitted
    if device.type == "cuda":
        torch.cuda.synchronize()
    before = dict(engine.stats.phase_seconds)
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    # The host is one step behind: as many steps were read as were launched, the first of them launched before.
    emitted = engine.stats.acceptance.emitted - emitted
    return Measured(seconds / steps * 1e3, emitted / seconds, emitted / steps, phase_ms(engine, before, steps))


def phase_ms(engine: Engine, before: Mapping[Phase, float], steps: int) -> dict[Phase, float]:
    """Return what drafting and verifying took in each of the last steps, by the device's clock where it has one."""
    phases: tuple[Phase, ...] = ("draft", "verify")
    return {phase: (engine.stats.phase_seconds[phase] - before[phase]) / steps * 1e3 for phase in phases}


def start_requests(engine: Engine, batch: int, context: int, max_tokens: int) -> list[int]:
    """Put a batch of requests with contexts of random tokens into decoding, without computing the contexts."""
    generator = torch.Generator().manual_seed(batch)
    started = []
    for row in range(batch):
        prompt = torch.randint(10, engine.vocab_size - 10, (context,), generator=generator).tolist()
        started.append(engine.add_computed(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), row))
    return started


def end_requests(engine: Engine, requests: list[int]) -> None:
    """End requests, and drop the step that is in flight."""
    for request in requests:
        engine.abort(request)
    engine.step()
