"""Chains as long as pays, on a GPU: the automatic choice beside plain decoding and every fixed length.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_adaptive.py --batches 1,8 --steps 150

Llama-8B's shape with random weights, contexts that are taken for computed, and acceptance simulated by position:
useless to excellent. One engine; what is chosen is fixed for all arms but the automatic one. With --tree its draft
grows trees of 16 nodes, and smaller ones are among the choices; simulated acceptance is then that of chains, so trees
can only lose, and the automatic choice must find that out.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from gpu_models import LLAMA_8B, SMOLLM_135M, TINY, random_draft, random_target
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.kernels import select
from slipstream.speculation.lengths import REST, Choice, LengthController
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

SHAPES = {"llama-8b": LLAMA_8B, "smollm": SMOLLM_135M, "tiny": TINY}
DEPTH = 5
KINDS = {
    "useless": (0.02, 0.0, 0.0, 0.0, 0.0),
    "poor": (0.35, 0.12, 0.04, 0.01, 0.0),
    "usual": (0.7, 0.5, 0.35, 0.25, 0.18),
    "good": (0.85, 0.72, 0.6, 0.5, 0.42),
    "excellent": (0.97, 0.94, 0.91, 0.88, 0.85),
}


class Fixed(LengthController):
    """Always chooses the same."""

    def __init__(self, choice: Choice, trees: Sequence[tuple[int, int]]) -> None:
        super().__init__([1, 3, DEPTH], trees)
        self._choice = choice

    def choose(self, num_rows: int, num_drafting: int, seconds: Mapping[Choice, float]) -> Choice:
        """Return what was said."""
        return self._choice


def tokens_a_second(engine: Engine, controller: LengthController, batch: int, context: int, steps: int) -> float:
    """Decode a batch for so many steps and return its tokens a second."""
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    executor._lengths = controller  # an arm of the comparison
    params = SamplingParams(max_tokens=steps * (DEPTH + 1) + 64, ignore_eos=True)
    ids = [engine.add_computed([index % 61] * context, params, index) for index in range(batch)]
    for _ in range(8):
        engine.step()
    _wait()
    emitted, started = engine.stats.acceptance.emitted, time.perf_counter()
    for _ in range(steps):
        engine.step()
    _wait()
    rate = (engine.stats.acceptance.emitted - emitted) / (time.perf_counter() - started)
    for request in ids:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    return rate


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    """Measure; exit status 1 below the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tree", action="store_true")
    args = parser.parse_args()
    device, batches = (
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        [int(size) for size in args.batches.split(",")],
    )
    with torch.inference_mode():
        target = random_target(SHAPES[args.shape], torch.bfloat16, device)
        draft = random_draft(target, min(32000, target.spec.vocab_size))
    room = args.context + args.steps * (DEPTH + 1) + 256
    config = EngineConfig(
        max_context=room,
        max_requests=max(batches),
        num_pages=max(batches) * (room // 16 + 4),
        prefix_cache=False,
        adaptive_depth=True,
        cuda_graphs="on",
    )
    shape = TreeShape(depth=DEPTH, width=4, budget=16) if args.tree else TreeShape.chain(DEPTH)
    trees = [(DEPTH, 8), (DEPTH, 16)] if args.tree else []
    engine = build_engine(target, draft, shape, config, select(device))
    started = time.perf_counter()
    print(*engine.warm_up(), f"{time.perf_counter() - started:.0f} s", sep="\n", flush=True)
    fixed = {"plain": REST, **{f"chain {n}": Choice(n, follows=True) for n in (1, 3, DEPTH)}}
    fixed |= {f"tree {budget}": Choice(depth, follows=True, budget=budget) for depth, budget in trees}
    worst, shares, count = 9.0, 0.0, 0
    for batch in batches:
        for kind, rates in KINDS.items():
            engine.simulate_acceptance(rates)
            found = {
                name: tokens_a_second(engine, Fixed(choice, trees), batch, args.context, args.steps)
                for name, choice in fixed.items()
            }
            automatic = LengthController([1, 3, DEPTH], trees)
            found["automatic"] = tokens_a_second(engine, automatic, batch, args.context, args.steps)
            best = max(found[name] for name in fixed)
            worst = min(worst, found["automatic"] / found["plain"])
            shares, count = shares + found["automatic"] / best, count + 1
            told = "" if automatic.last is None else str(automatic.last.chosen)
            print(json.dumps({"batch": batch, "kind": kind, **{k: round(v) for k, v in found.items()}, "chosen": told}))
    print(f"worst beside plain {worst:.3f}x, mean beside the best fixed choice {shares / count:.3f}x")
    return int(worst < 0.97 or shares / count < 0.97)


if __name__ == "__main__":
    sys.exit(main())
