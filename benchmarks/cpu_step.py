"""Time whole steps of the embedded model on a CPU, interleaved, as ratios to a step over one row.

    python benchmarks/cpu_step.py [--threads 2] [--context 200] [--rounds 30] [--keys float16 bfloat16]

A target step is what checking costs: blocks (with the states a draft wants), head and choice. It is timed for one
request of M rows, and for 8 requests of 1 to 4 rows. A draft step is one level of a chain.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from slipstream.checkpoint.embedded import GGUF_FILE, embedded_draft
from slipstream.checkpoint.hub import resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.engine.loading import read_draft
from slipstream.kernels import ChainStart
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.models.context import KvCache, PagedContext, QueryTokens, page_table, paged_context
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import captured_layers, load_target
from slipstream.models.target import Target

SHAPES = (*((1, rows) for rows in (1, 2, 4, 6, 8, 16, 24, 32)), (8, 1), (8, 2), (8, 3), (8, 4))  # requests, rows each
DRAFTED = ((1, 3), (8, 1), (8, 3))  # requests, levels
PAGE_SIZE = 16
CPU = torch.device("cpu")


def main() -> None:
    """Print one line per step: milliseconds, and the ratio to one row of one request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--keys", nargs="+", default=["float16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = CpuOps(args.threads)
    target = load_target(open_checkpoint(resolve("embedded") / GGUF_FILE), torch.float32, CPU, ops=ops)
    path = embedded_draft()
    assert path is not None, "the embedded draft ships with the package"
    draft = read_draft(path, target, None, ops)
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    for keys in args.keys:
        for requests, rows in SHAPES:
            steps[f"{requests} x {rows} rows", keys] = target_step(
                target, draft, ops, keys, (requests, rows, args.context)
            )
        for requests, levels in DRAFTED:
            steps[f"{requests} x {levels} drafted", keys] = draft_step(
                draft, target, ops, keys, (requests, levels, args.context)
            )
    times: dict[tuple[str, str], list[float]] = {name: [] for name in steps}
    for round in range(args.rounds + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if round >= 2:
                times[name].append(time.perf_counter() - started)
    one = statistics.median(times["1 x 1 rows", args.keys[0]])
    print(f"{args.context} tokens of context, {ops.isa}, {args.threads} threads, medians of {args.rounds}")
    for (name, keys), seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:14} {keys:9} {1e3 * median:8.3f} ms {median / one:6.2f}")


def context(ops: CpuOps, kv: KvCache, shape: tuple[int, int, int]) -> PagedContext:
    """Return the context of a pass over the last rows of some requests."""
    requests, rows, before = shape
    pages = -(-(before + 64) // PAGE_SIZE)
    index_T = torch.arange(before, before + rows).repeat(requests)
    table_RP = page_table([range(row * pages, (row + 1) * pages) for row in range(requests)], CPU)
    return paged_context(
        ops, kv, table_RP, QueryTokens([rows] * requests, index_T, index_T, torch.full_like(index_T, -1))
    )


def cache(model: Target | Eagle3Draft, keys: str, shape: tuple[int, int, int]) -> KvCache:
    """Return random keys and values for the requests of a pass."""
    num_pages = shape[0] * -(-(shape[2] + 64) // PAGE_SIZE)
    kv = KvCache.allocate(model.kv_shape, num_pages, PAGE_SIZE, getattr(torch, keys), CPU)
    for layer in kv.layers:
        layer.keys_SGd.copy_(torch.randn(layer.keys_SGd.shape))
        layer.values_SGd.copy_(torch.randn(layer.values_SGd.shape))
    return kv


def target_step(
    target: Target, draft: Eagle3Draft, ops: CpuOps, keys: str, shape: tuple[int, int, int]
) -> Callable[[], object]:
    """Return a step of the target: blocks, head, choice."""
    ctx = context(ops, cache(target, keys, shape), shape)
    count = shape[0] * shape[1]
    tokens_T = torch.randint(0, target.spec.vocab_size, (count,))
    captured = captured_layers(draft.spec, target.spec)
    zeros_T = torch.zeros(count, dtype=torch.int64)

    def step() -> object:
        hidden = target(tokens_T, ctx, captured)
        return ops.choose(target.logits(hidden.last_TD, ops), torch.zeros(count), zeros_T, zeros_T)

    return step


def draft_step(
    draft: Eagle3Draft, target: Target, ops: CpuOps, keys: str, shape: tuple[int, int, int]
) -> Callable[[], object]:
    """Return the drafting of chains."""
    requests, levels, before = shape
    kv = cache(draft, keys, shape)
    start = ChainStart(
        context(ops, kv, (requests, 1, before)).batch.page_table_RP,
        PAGE_SIZE,
        torch.full((requests,), before),
        torch.zeros(requests),
        torch.zeros(requests, dtype=torch.int64),
        torch.randn(requests, draft.spec.hidden_size),
        torch.randn(requests, len(draft.token_ids_V)),
    )
    return lambda: ops.draft_chain(draft, kv, start, levels, -float("inf"))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
