"""Prompt tokens a second by length: `slipstream serve` beside llama.cpp and ik_llama.cpp, one run, taking turns.

    python benchmarks/prefill.py --ik path/to/ik_llama.cpp/build/bin --out out/prefill.json
    python benchmarks/prefill.py --model path/to/model --alone --serve "--tp 2"      # a server alone, any device

One prompt at a time, of random tokens that no two turns share; the time is until the first token is there, ours over
HTTP. llama.cpp computes the same tokens from the same file, and from Q4_0 made of it. ik_llama.cpp is measured by its
own `llama-bench` if a folder with that program is named; it takes as many random tokens of its own, and its time leaves
out reading the answer. Ratios are medians over rounds of ratios within a round, with the range.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peers.arms import all_arms, start
from peers.tables import Ratio
from serve_client import post, server
from slipstream.bench.hardware import find_hardware
from slipstream.bench.peers.process import Peer
from slipstream.checkpoint.embedded import GGUF_FILE
from slipstream.checkpoint.embedded_folder import embedded_folder
from slipstream.records.store import write_text

SETTLE_S = 0.3  # OpenMP's threads spin for a while after their work; the next program shall not meet them
TOKENS = range(1000, 32000)  # ids that any model's vocabulary has and no template gives a meaning
PLAIN = "slipstream serve, no draft"
Program = Callable[[list[int]], float]
"""Compute a prompt and its first token; return the seconds."""


def main() -> int:
    """Start everybody, let them take turns, and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="what to serve; programs beside it run the embedded model")
    parser.add_argument("--serve", default="", help="further options of `slipstream serve`")
    parser.add_argument("--alone", action="store_true", help="nothing beside our servers")
    parser.add_argument("--ik", type=Path, help="a folder with ik_llama.cpp's llama-bench, built by you")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # inherited by every program
    with ExitStack() as stack:
        speeds = _rounds(_programs(stack, args), args.lengths, args.rounds)
    Console().print(_table(speeds, args.lengths))
    if args.out is not None:
        settings = {name: str(value) for name, value in vars(args).items()}
        record = {"settings": settings, "hardware": asdict(find_hardware()), "tokens_per_s": speeds}
        write_text(args.out, json.dumps(record, indent=1))
    return 0


def _programs(stack: ExitStack, args: argparse.Namespace) -> dict[str, Program]:
    """Start the programs; a server's process ends with the stack."""
    context = max(args.lengths) + 64
    options = [args.model, "--no-prefix-cache", "--max-context", str(context), *shlex.split(args.serve)]
    programs: dict[str, Program] = {}
    for name, draft in (("slipstream serve", []), (PLAIN, ["--draft", "none"])):
        programs[name] = partial(_ask, stack.enter_context(server([*options, *draft]))[1])
    if args.alone or args.model != "embedded":
        return programs
    file = embedded_folder() / GGUF_FILE
    for arm in all_arms(file, file, (), args.threads, context, 1):
        if arm.program == "llama" and not arm.name.endswith("Q8_0"):
            programs[arm.name] = partial(_run, stack.enter_context(start(arm)))
    if args.ik is not None:
        programs["ik_llama.cpp"] = partial(_ik, args.ik / "llama-bench", file, args.threads)
    return programs


def _ask(port: int, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = asyncio.run(post(port, "/v1/completions", body))
    assert answer.status == 200, answer.body
    return time.perf_counter() - began


def _run(peer: Peer, prompt: list[int]) -> float:
    [(seconds, _, _)] = peer.ask("run", prompts=[prompt], tokens=1)
    return float(seconds)


def _ik(program: Path, model: Path, threads: int, prompt: list[int]) -> float:
    command = [program, "-m", model, "-t", threads, "-p", len(prompt), "-n", 0, "-r", 1, "-o", "json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout[done.stdout.index("[") :])[0]["avg_ns"]) / 1e9


def _rounds(programs: dict[str, Program], lengths: list[int], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Return tokens a second by program, length and round; a first, short round only warms up."""
    rng = random.Random(1)
    speeds: dict[str, dict[int, list[float]]] = {name: {length: [] for length in lengths} for name in programs}
    for number in range(-1, rounds):
        for length in lengths if number >= 0 else lengths[:2]:
            for name, program in programs.items():
                time.sleep(SETTLE_S)
                seconds = program(rng.choices(TOKENS, k=length))
                if number >= 0:
                    speeds[name][length].append(length / seconds)
    return speeds


def _table(speeds: dict[str, dict[int, list[float]]], lengths: list[int]) -> Table:
    """Show each program's median speed by length, and what ours without a draft is beside it."""
    table = Table("", *(f"{length:,}" for length in lengths), title="prompt tokens a second; times ours, no draft")
    for name, by_length in speeds.items():
        cells = []
        for length in lengths:
            pairs = [mine / other for mine, other in zip(speeds[PLAIN][length], by_length[length], strict=True)]
            ratio = Ratio(statistics.median(pairs), min(pairs), max(pairs))
            cells.append(f"{statistics.median(by_length[length]):,.0f}" + (f"\n{ratio}" if name != PLAIN else ""))
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
