"""Speculation that never loses, on a GPU: what steps choose by themselves, beside plain decoding and every fixed shape.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_grid.py --out grid.json                    # Llama-8B's shape
    PYTHONPATH=src:benchmarks python benchmarks/gpu_grid.py --model kimi --out grid-kimi.json  # one of 8 ranks

Random weights, contexts that are taken for computed, and acceptance simulated by place, useless to excellent. What a
step of each fixed shape takes is measured once for each batch and context, and what it would give follows. The
automatic choice really runs at every point, from knowing nothing, in turns with plain decoding of requests that do not
draft; requests start over before they are 256 tokens longer than their context. Results are written as they come, for
batches in the order given; exit status 1 below the bounds.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_models import LLAMA_8B, SMOLLM_135M, TINY, random_draft, random_target
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.cuda_graph.menu import StepMenu
from slipstream.executors.cuda_graph.step import StepKind
from slipstream.kernels import Ops, select
from slipstream.measure.rank import ExpertCount, rank_kernels
from slipstream.measure.rank_models import build_draft, build_target, rank_of
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.moe import Router
from slipstream.models.target import Target
from slipstream.speculation.choosing import Choice, named
from slipstream.speculation.sampling import SamplingParams

SHAPES = {"llama-8b": LLAMA_8B, "smollm": SMOLLM_135M, "tiny": TINY}
RANKS = {"kimi": False, "tiny-kimi": True}
KINDS = {
    "useless": (0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "poor": (0.35, 0.12, 0.04, 0.01, 0.0, 0.0, 0.0),
    "usual": (0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08),
    "good": (0.85, 0.72, 0.6, 0.5, 0.42, 0.35, 0.3),
    "excellent": (0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79),
}
GROWS = 256
FEWEST_STEPS, MOST_STEPS, PLAIN_STEPS, FIXED_STEPS = 80, 240, 16, 12


@dataclass(frozen=True)
class Pair:
    """What is measured: a target and its draft, their kernels, and what counts the experts a pass hits, if any."""

    target: Target
    draft: Eagle3Draft
    ops: Ops
    experts: ExpertCount | None = None


class Fixed(StepMenu):
    """Always takes the same choice."""

    choice: Choice = None

    def next(self, plain: StepKind, rows: object, *, joined: bool) -> StepKind:
        """Return what was said."""
        return self._kinds(plain)[self.choice]


class Grid:
    """Runs arms of the comparison on one engine, so that every graph is captured once."""

    def __init__(self, pair: Pair, batches: Sequence[int], contexts: Sequence[int]) -> None:
        room = max(contexts) + 2 * GROWS
        config = EngineConfig(
            max_context=room,
            max_requests=max(batches),
            num_pages=max(batches) * (room // 16 + 2),
            prefix_cache=False,
            cuda_graphs="on",
        )
        self._engine, self._experts = build_engine(pair.target, pair.draft, None, config, pair.ops), pair.experts
        executor = self._engine.executor
        assert isinstance(executor, GraphExecutor)
        self._executor, self._on_gpu = executor, executor.device.type == "cuda"
        self._seed = 0

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    def prepare(self, batches: Sequence[int]) -> list[str]:
        """Capture every choice for the batches, and plain decoding without a draft; no prompts come."""
        prepared, menu = self._executor._prepared, self.menu()
        prepared._sizes, prepared._pretend_prompts = (), lambda size, count: None  # type: ignore[method-assign]

        def kinds(num_rows: int, max_keys: int) -> dict[StepKind, bool]:
            wanted = menu.kinds(num_rows, max_keys) if num_rows in batches else {}
            return {**wanted, **({StepKind(num_rows, 0, max_keys): False} if wanted else {})}

        with torch.inference_mode():
            told = prepared.warm_up(kinds)
            if not self._on_gpu:
                prepared.measure()
        return told

    def choices(self, batch: int) -> list[Choice]:
        """Return what a batch may be drafted."""
        menu, prepared = self.menu(), self._executor._prepared
        return list(menu._kinds(menu.plain(prepared.num_rows(batch), prepared._bounds[0])))

    def menu(self) -> StepMenu:
        """Return what chooses, knowing nothing but what was measured at the start."""
        return StepMenu(self._executor._shapes, self._executor._prepared)

    def fixed(self, batch: int, context: int, choice: Choice, steps: int) -> dict[str, float]:
        """Return what a step of a choice takes, in milliseconds, and how many experts of a layer it hits."""
        menu = Fixed(self._executor._shapes, self._executor._prepared)
        menu.choice = choice
        self._executor._menu = menu
        self._engine.simulate_acceptance((0.0,))
        requests = self._start(batch, context)
        seconds, _, _ = self._timed(steps)
        found = {"ms": seconds / steps * 1e3}
        if self._experts is not None:
            found["experts"] = self._experts_hit()
        self._end(requests)
        return found

    def plain(self, batch: int, context: int, steps: int) -> float:
        """Return the milliseconds of a step of requests that do not draft."""
        menu = Fixed((), self._executor._prepared)
        self._executor._menu = menu
        requests = self._start(batch, context)
        seconds, _, _ = self._timed(steps)
        self._end(requests)
        return seconds / steps * 1e3

    def automatic(self, menu: StepMenu, batch: int, context: int, steps: int) -> tuple[float, int, dict[str, int]]:
        """Return the seconds of so many steps as the menu chooses, their tokens, and how often it chose what."""
        chosen: dict[str, int] = {}
        controller = menu.controller
        assert controller is not None
        choose = controller.choose

        def noted(*args: Any) -> Choice:
            choice = choose(*args)
            chosen[named(choice)] = chosen.get(named(choice), 0) + 1
            return choice

        seconds, tokens, left = 0.0, 0, steps
        while left:
            self._executor._menu = Fixed((), self._executor._prepared)
            requests = self._start(batch, context)
            self._executor._menu, controller.choose = menu, noted  # type: ignore[method-assign]
            taken, given, ran = self._timed(left, batch * GROWS)
            seconds, tokens, left = seconds + taken, tokens + given, left - ran
            controller.choose = choose  # type: ignore[method-assign]
            self._end(requests)
        return seconds, tokens, chosen

    def _start(self, batch: int, context: int) -> list[int]:
        """Start requests, and take steps until they all decode."""
        params = SamplingParams(max_tokens=2 * GROWS, ignore_eos=True)
        requests = []
        for index in range(batch):
            self._seed += 1
            prompt = [(self._seed + index) % 61] * context
            requests.append(self._engine.add_computed(prompt, params, self._seed))
        for _ in range(2):
            self._engine.step()
        return requests

    def _timed(self, steps: int, most_tokens: float = math.inf) -> tuple[float, int, int]:
        """Return the seconds of so many steps, the tokens of all requests, and how many steps that took."""
        self._wait()
        acceptance, ran = self._engine.stats.acceptance, 0
        before, started = acceptance.emitted, time.perf_counter()
        while ran < steps and acceptance.emitted - before < most_tokens:
            self._engine.step()
            ran += 1
        self._wait()
        return time.perf_counter() - started, acceptance.emitted - before, ran

    def _end(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._engine.abort(request)
        while self._engine.has_work or self._executor.in_flight:
            self._engine.step()

    def _experts_hit(self) -> float:
        """Run the target's pass over the present nodes once more, and count the experts each layer chooses."""
        assert self._experts is not None
        executor, count = self._executor, self._experts
        kind = executor._kind(list(executor._rows.values()), joined=False)
        count.distinct, count.counting = [], True
        with torch.inference_mode():
            executor._prepared.step(kind).step.verify()
        count.counting = False
        return sum(count.distinct) / max(len(count.distinct), 1)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def build(name: str, device: torch.device) -> Pair:
    """Return a target of random weights and its draft."""
    if name in RANKS:
        model, kernels = rank_of("kimi-k2.5", 2 if RANKS[name] else 8, RANKS[name]), rank_kernels(device, "auto", {})
        spec = dataclasses.replace(model.target, num_layers=6) if RANKS[name] else model.target
        target = build_target(spec, model.experts, 16384, device)
        for part in target.modules():
            if isinstance(part, Router):
                part.register_forward_hook(lambda _module, _inputs, chosen: kernels.count(chosen[0]))
        return Pair(target, build_draft(model.draft, 16384, device), kernels.ops, kernels.count)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = random_target(SHAPES[name], dtype, device)
    return Pair(target, random_draft(target, min(32000, target.spec.vocab_size)), select(device))


def points(grid: Grid, batch: int, context: int, seconds: float, until: float) -> list[dict[str, Any]]:
    """Measure all kinds of acceptance at one batch and context; none is begun after a moment."""
    fixed = {choice: grid.fixed(batch, context, choice, FIXED_STEPS) for choice in grid.choices(batch)}
    plain_ms = [grid.plain(batch, context, PLAIN_STEPS)]
    steps = min(max(int(seconds * 1e3 / plain_ms[0]), FEWEST_STEPS), MOST_STEPS) // 2
    rows = []
    for kind, rates in KINDS.items():
        if time.perf_counter() > until:
            break
        grid.engine.simulate_acceptance(rates)
        menu = grid.menu()
        halves = []
        for _ in range(2):
            halves.append(grid.automatic(menu, batch, context, steps))
            plain_ms.append(grid.plain(batch, context, PLAIN_STEPS))
        near = plain_ms[-3:]
        plain = batch / (sum(near) / len(near)) * 1e3
        automatic = sum(tokens for _, tokens, _ in halves) / sum(taken for taken, _, _ in halves)
        given = {
            named(choice): batch * (1 + sum(rates[: choice.depth] if choice is not None else ())) / found["ms"] * 1e3
            for choice, found in fixed.items()
        }
        best = max(given, key=lambda name: given[name])
        chosen: dict[str, int] = {}
        for _, _, part in halves:
            chosen = {name: chosen.get(name, 0) + part.get(name, 0) for name in {**chosen, **part}}
        rows.append({
            "batch": batch, "context": context, "kind": kind, "plain": round(plain, 1),
            "automatic": round(automatic, 1), "best": best, "best_fixed": round(given[best], 1),
            "beside_plain": round(automatic / plain, 4), "chosen": chosen,
            "beside_best": round(automatic / max(*given.values(), plain), 4),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    told = {named(choice): {name: round(value, 3) for name, value in found.items()} for choice, found in fixed.items()}
    print(json.dumps({"batch": batch, "context": context, "fixed": told, "plain_ms": plain_ms}), flush=True)
    return [{**row, "fixed": told} for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table: times plain decoding, and in brackets the share of the best fixed choice."""
    lines = [f"| batch | context | {' | '.join(KINDS)} |", "|---" * (2 + len(KINDS)) + "|"]
    for batch, context in sorted({(row["batch"], row["context"]) for row in rows}, key=lambda at: at[::-1]):
        cells = {row["kind"]: row for row in rows if (row["batch"], row["context"]) == (batch, context)}
        told = [
            f"{cells[kind]['beside_plain']:.2f} ({cells[kind]['beside_best']:.2f})" if kind in cells else ""
            for kind in KINDS
        ]
        lines.append(f"| {batch} | {context} | {' | '.join(told)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure; exit status 1 below the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, *RANKS], default="llama-8b")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="1024,10240")
    parser.add_argument("--seconds", type=float, default=0.8, help="of plain decoding, that a point is worth")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing further is begun")
    parser.add_argument("--out", type=Path, default=Path("grid.json"))
    args = parser.parse_args()
    started, device = time.perf_counter(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    until = started + args.limit
    batches, contexts = ([int(value) for value in text.split(",")] for text in (args.batches, args.contexts))
    with torch.inference_mode():
        pair = build(args.model, device)
        grid = Grid(pair, batches, contexts)
    print(f"built after {time.perf_counter() - started:.0f} s", flush=True)
    # Kernels of experts are compiled one after the other: what is captured batch by batch is measured in time.
    groups = [batches] if pair.experts is None else [[batch] for batch in batches]
    rows: list[dict[str, Any]] = []
    for group in groups:
        if time.perf_counter() > until:
            break
        print(*grid.prepare(group), f"ready after {time.perf_counter() - started:.0f} s", sep="\n", flush=True)
        for batch, context in itertools.product(group, contexts):
            if time.perf_counter() < until:
                rows += points(grid, batch, context, args.seconds, until)
                result = {"model": args.model, "device": _named(device), "points": rows}
                args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(table(rows))
    if not rows:
        return 1
    worst, mean = min(row["beside_plain"] for row in rows), sum(row["beside_best"] for row in rows) / len(rows)
    print(f"{len(rows)} points: worst beside plain {worst:.3f}x, mean beside the best fixed choice {mean:.3f}x")
    print(f"{time.perf_counter() - started:.0f} s")
    return int(worst < 0.97 or mean < 0.97)


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
