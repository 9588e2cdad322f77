"""What captured steps with trees cost on a GPU, beside one node and a chain of 3.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_tree_steps.py --contexts 1024,10240

Llama-8B's shape with random weights, one request whose context is taken for computed. Each part of a step is launched
alone and timed by events; the target's pass over 16 and 32 nodes is compared with that over one.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable

import torch

from gpu_models import LLAMA_8B, TINY, random_draft, random_target
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.cuda_graph.step import StepKind
from slipstream.executors.cuda_graph.tree_step import make_step
from slipstream.kernels import CompiledOps, select
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

TREES = {
    "16 nodes": TreeShape(depth=5, width=4, budget=15),
    "32 nodes": TreeShape(depth=7, width=8, budget=31),
    "64 nodes": TreeShape(depth=5, width=8, budget=63),
}


def kinds(max_keys: int) -> dict[str, StepKind]:
    """Return the kinds of steps for one row."""
    trees = {name: StepKind(1, shape.num_nodes - 1, max_keys, tree=shape) for name, shape in TREES.items()}
    return {"1 node": StepKind(1, 0, max_keys, notes=True), "chain of 3": StepKind(1, 3, max_keys), **trees}


def seconds(function: Callable[[], None], repeats: int) -> float:
    """Return the median time of a launch, by events."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    for _ in range(3):
        function()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    taken = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return taken[len(taken) // 2] / 1e3


def measure(engine: Engine, context: int, repeats: int) -> None:
    """Print what each part of each kind of step takes with so many keys."""
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    prepared = executor._prepared
    request = engine.add_computed([5] * context, SamplingParams(max_tokens=600, ignore_eos=True), 0)
    for _ in range(2):
        engine.step()
    alone = 0.0
    for name, kind in kinds(prepared.max_keys(context + 600)).items():
        launches = prepared.step(kind)
        state = executor._state.saved()
        parts = {"draft": launches.draft, "verify": launches.verify, "choose": launches.choose}
        if kind.num_drafted:
            parts["extend"] = launches.extend
        found = {}
        for part, launch in parts.items():
            found[part] = seconds(launch, repeats)
            executor._state.restore(state)
            launches.draft()
        alone = alone or found["verify"]
        told = {part: round(taken * 1e3, 3) for part, taken in found.items()}
        print(json.dumps({
            "context": context, "step": name, **told, "cycle_ms": round(sum(found.values()) * 1e3, 3),
            "verify_beside_1": round(found["verify"] / alone, 3),
        }), flush=True)  # fmt: skip
    engine.abort(request)
    while engine.has_work:
        engine.step()


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1024,10240")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device, contexts = torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.contexts.split(",")
    started = time.perf_counter()
    with torch.inference_mode():
        target = random_target(TINY if args.tiny else LLAMA_8B, torch.bfloat16, device)
        draft = random_draft(target, min(32000, target.spec.vocab_size))
        room = max(map(int, contexts)) + 800
        config = EngineConfig(
            max_context=room, max_requests=1, num_pages=2 * (room // 16 + 40), prefix_cache=False, cuda_graphs="on"
        )
        engine = build_engine(target, draft, TREES["64 nodes"], config, select(device))
        executor = engine.executor
        assert isinstance(executor, GraphExecutor)
        prepared, ops = executor._prepared, executor.runner.ops
        wanted = [kind for c in contexts for kind in kinds(prepared.max_keys(int(c) + 600)).values()]
        if device.type == "cuda" and isinstance(ops, CompiledOps):
            with prepared._nobody_there(), ops.compiling():
                for kind in dict.fromkeys(wanted):
                    step = make_step(executor._models, executor._buffers, kind)
                    step.draft()
                    step.verify()
                    step.choose()
                    if kind.num_drafted:
                        step.extend()
        print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
        for context in contexts:
            measure(engine, int(context), args.repeats)
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
