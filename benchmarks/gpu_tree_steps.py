"""What captured steps with trees cost on a GPU, beside one node and a chain of 3, and whether that is within bounds.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_tree_steps.py --profile

Llama-8B's shape with random weights, one request whose context is taken for computed. Each part of a step is launched
alone and timed by events; the target's pass over 16 and 32 nodes is compared with that over one. Prints a table, the
kernels of a pass over 16 nodes and of a cycle of 64, and which bounds are met; exit status 1 if any is not.
"""

import argparse
import math
import statistics
import sys
import time

import torch

from gpu_measure import time_ms
from gpu_models import LLAMA_8B, TINY, random_draft, random_target
from gpu_profile import kernel_shares, report
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


BOUNDS = {("16 nodes", "pass"): 1.2, ("32 nodes", "pass"): 1.3, ("64 nodes", "cycle"): 6.5}
"""Of a pass beside that over one node, and of a cycle, in milliseconds, with the shortest context."""
HEADER = (
    "| keys | step | draft | verify | choose | extend | cycle, ms | beside 1 node |\n|---|---|---|---|---|---|---|---|"
)


def kinds(max_keys: int) -> dict[str, StepKind]:
    """Return the kinds of steps for one row."""
    trees = {name: StepKind(1, shape.num_nodes - 1, max_keys, tree=shape) for name, shape in TREES.items()}
    return {"1 node": StepKind(1, 0, max_keys, notes=True), "chain of 3": StepKind(1, 3, max_keys), **trees}


def measure(engine: Engine, context: int, args: argparse.Namespace) -> dict[str, str]:
    """Print a row for each kind of step with so many keys; return what is bounded, with a word on the bound."""
    executor, device = engine.executor, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert isinstance(executor, GraphExecutor)
    request = engine.add_computed([5] * context, SamplingParams(max_tokens=600, ignore_eos=True), 0)
    for _ in range(2):
        engine.step()
    alone, judged = 0.0, {}
    for name, kind in kinds(executor._prepared.max_keys(context + 600)).items():
        launches, state, found = executor._prepared.step(kind), executor._state.saved(), []
        for launch in launches.parts():
            found.append(statistics.median(time_ms(launch, device, args.repeats)))
            executor._state.restore(state)
            launches.draft()
        verify, cycle = found[1], sum(found)
        alone = alone or verify
        told = " | ".join(f"{taken:.3f}" for taken in (*found, cycle))
        print(f"| {context} | {name} | {told} | {verify / alone:.3f}x |", flush=True)
        for what, value in (("pass", verify / alone), ("cycle", cycle)):
            most = BOUNDS.get((name, what), math.inf)
            if most < math.inf and (what == "pass" or context == min(map(int, args.contexts.split(",")))):
                judged[f"{name}, {context} keys, {what}:"] = (
                    f"{value:.3f} of {most}, {'met' if value <= most else 'MISSED'}"
                )
        profiled = {"16 nodes": [launches.verify], "64 nodes": launches.parts()}.get(name)
        if args.profile and profiled and device.type == "cuda":
            print(report(kernel_shares(lambda parts=profiled: [part() for part in parts])), flush=True)
            executor._state.restore(state)
    engine.abort(request)
    while engine.has_work:
        engine.step()
    return judged


def engine_for(contexts: list[int], args: argparse.Namespace, device: torch.device) -> Engine:
    """Return an engine for one request, the kernels of all its steps compiled."""
    target = random_target(TINY if args.tiny else LLAMA_8B, torch.bfloat16, device)
    draft, room = random_draft(target, min(32000, target.spec.vocab_size)), max(contexts) + 800
    config = EngineConfig(
        max_context=room, max_requests=1, num_pages=2 * (room // 16 + 40), prefix_cache=False, cuda_graphs="on"
    )
    engine = build_engine(target, draft, TREES["64 nodes"], config, select(device))
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    prepared, ops = executor._prepared, executor.runner.ops
    wanted = [kind for context in contexts for kind in kinds(prepared.max_keys(context + 600)).values()]
    if device.type == "cuda" and isinstance(ops, CompiledOps):
        with prepared._nobody_there(), ops.compiling():
            for kind in dict.fromkeys(wanted):
                step = make_step(executor._models, executor._buffers, kind)
                for part in (step.draft, step.verify, step.choose, *([step.extend] if kind.num_drafted else [])):
                    part()
    return engine


def main() -> int:
    """Measure; exit status 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1024,10240")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="kernels of 16 nodes' pass and 64 nodes' cycle, too")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device, contexts = torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.contexts.split(",")
    started, judged = time.perf_counter(), dict[str, str]()
    with torch.inference_mode():
        engine = engine_for(list(map(int, contexts)), args, device)
        print(f"ready after {time.perf_counter() - started:.0f} s\n\n{HEADER}", flush=True)
        for context in contexts:
            judged |= measure(engine, int(context), args)
    print("\n" + "\n".join(f"{what} {said}" for what, said in judged.items()))
    print(f"{time.perf_counter() - started:.0f} s")
    return int(any("MISSED" in said for said in judged.values()))


if __name__ == "__main__":
    sys.exit(main())
