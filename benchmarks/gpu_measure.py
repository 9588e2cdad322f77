"""How the GPU benchmark measures: read bandwidth, bytes a step must read, steps through the engine, one pass alone."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.cuda_graph.state import BatchState, Loaded, StepModels
from slipstream.executors.cuda_graph.step import Step, StepBuffers, StepKind
from slipstream.executors.interface import Phase
from slipstream.kernels import SamplingState, TokenMasks
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Linear
from slipstream.models.target import Target
from slipstream.speculation.sampling import SamplingParams


@dataclass(frozen=True)
class Measured:
    """Steps of one batch: wall time of a step, tokens of all requests per second, and where the time went."""

    step_ms: float
    tokens_per_s: float
    tokens_per_step: float
    device_ms: float | None

    @property
    def host_overhead(self) -> float | None:
        """Share of the wall time in which the device was not at work on a step."""
        return None if self.device_ms is None else max(0.0, 1 - self.device_ms / self.step_ms)


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
    device_ms = device_step_ms(engine, before, steps) if device.type == "cuda" else None
    return Measured(seconds / steps * 1e3, emitted / seconds, emitted / steps, device_ms)


def device_step_ms(engine: Engine, before: Mapping[Phase, float], steps: int) -> float:
    """Return what the device took for each of the last steps, by its own clock; prompts are left out."""
    phases: tuple[Phase, ...] = ("draft", "verify")
    return sum(engine.stats.phase_seconds[phase] - before[phase] for phase in phases) / steps * 1e3


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


def pass_ms(models: StepModels, num_rows: int, num_drafted: int, context: int, repeats: int) -> float:
    """Return the median time of one target pass over every row's root and drafted nodes, in a graph if that can be."""
    device, vocab = models.device, models.target.spec.vocab_size
    pages_each = -(-(context + num_drafted + 1) // models.target_kv.page_size)
    state = BatchState(models, num_rows, pages_each)
    order = torch.randperm(num_rows * pages_each).view(num_rows, pages_each).tolist()
    for row, pages in enumerate(order):
        state.load(row, Loaded(context, 0, row, 0, row, 0.0), pages)
    no_masks = TokenMasks(
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.full((num_rows * (num_drafted + 1),), -1, dtype=torch.int64, device=device),
    )
    unsimulated_K = torch.full((num_drafted,), -1, dtype=torch.int64, device=device)
    kind = StepKind(num_rows, num_drafted, pages_each * models.target_kv.page_size)
    step = Step(models, StepBuffers(state, SamplingState(num_rows, vocab, device), no_masks, unsimulated_K), kind)
    nodes_RK = torch.randint(0, vocab, (num_rows, num_drafted), device=device)

    def place_and_verify() -> None:
        # Only the target is measured, so what a draft would have written is put there instead.
        step._chains.place_chains(step._rows.chains, step._passes.places, models.target_kv.page_size)
        step.chain_RN[:, 1:].copy_(nodes_RK)
        step.verify()

    work = in_graph(place_and_verify, models.ops.capturable and device.type == "cuda")
    return statistics.median(time_ms(work, device, repeats))


def in_graph(work: Callable[[], object], capturable: bool) -> Callable[[], object]:
    """Return the work captured in a CUDA graph, or as it is."""
    if not capturable:
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay
