"""Prompt tokens a second by length: our server and engine beside llama.cpp and ik_llama.cpp, one run, taking turns.

    python benchmarks/prefill.py --ik path/to/ik_llama.cpp/build/bin --out out/prefill.json
    python benchmarks/prefill.py --model path/to/model --peers "" --serve "--tp 2"      # a server alone, any device

One prompt at a time, of random tokens that no two turns share; the time is until the first token is there. Ours is
measured over HTTP (`slipstream serve`, with the draft it takes by itself and without one) and, for the embedded model,
through the engine. llama.cpp computes the same token ids from the same file, and from Q4_0 made of it, its fastest
format here. ik_llama.cpp is measured by its own
`llama-bench` if a folder with that program is named; it takes as many random tokens of its own, and its time leaves out
reading the answer. In every round each program takes its turn at each length, with a pause between; ratios are medians
over rounds of ratios within a round, with the range.
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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peers.arms import PLAIN, SAME_FILE, Limits, Models, all_arms, start
from peers.tables import Ratio
from serve_client import post, server
from slipstream.bench.hardware import find_hardware
from slipstream.bench.peers.environments import environments_dir
from slipstream.bench.peers.process import Peer
from slipstream.checkpoint.embedded import GGUF_FILE
from slipstream.checkpoint.embedded_folder import embedded_folder

LENGTHS = (128, 512, 1024, 2048, 4096)
SETTLE_S = 0.3  # OpenMP's threads spin for a while after their work; the next program shall not meet them
TOKENS = range(1000, 32000)  # ids that any model's vocabulary has and no template gives a meaning
SERVED, SERVED_PLAIN, IK = "slipstream, HTTP", "slipstream, HTTP, no draft", "ik_llama.cpp"
Program = Callable[[list[int]], float]
"""Compute a prompt and its first token; return the seconds."""


def main() -> int:
    """Start everybody, let them take turns, and show what came of it."""
    args = _arguments()
    console = Console()
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cpus)  # inherited by every program
    with ExitStack() as stack:
        programs = _programs(stack, args, len(cpus))
        console.print(f"{', '.join(programs)}: {len(cpus)} threads, {args.rounds} rounds", highlight=False)
        speeds = _rounds(programs, args.lengths, args.rounds)
    console.print(_table(speeds, args.lengths))
    if args.out is not None:
        _write(args.out, {"settings": {name: str(value) for name, value in vars(args).items()},
                          "hardware": asdict(find_hardware()), "tokens_per_s": speeds})  # fmt: skip
        console.print(f"record: {args.out}")
    return 0


def _programs(stack: ExitStack, args: argparse.Namespace, threads: int) -> dict[str, Program]:
    """Start the programs; a server's process ends with the stack."""
    context = max(args.lengths) + 64
    options = ["--no-prefix-cache", "--max-context", str(context), *shlex.split(args.serve)]
    programs: dict[str, Program] = {}
    for name, draft in ((SERVED, []), (SERVED_PLAIN, ["--draft", "none"])):
        _, port = stack.enter_context(server([args.model, *options, *draft]))
        programs[name] = partial(_ask, port)
    if args.model != "embedded":
        return programs
    peers = args.peers.split(",") if args.peers else []
    folder = embedded_folder()
    made = environments_dir() / "models"
    made.mkdir(parents=True, exist_ok=True)
    models = Models(folder, folder, made / "no-draft")
    wanted = {PLAIN, *({SAME_FILE, "llama.cpp Q4_0"} if "llama" in peers else {})}
    for arm in all_arms(models, Limits(threads, context, 1), (), ()):
        if arm.name in wanted:
            programs[arm.name] = partial(_run, stack.enter_context(start(arm)))
    if args.ik is not None:
        programs[IK] = partial(_ik, args.ik / "llama-bench", folder / GGUF_FILE, threads)
    return programs


def _ask(port: int, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = asyncio.run(post(port, "/v1/completions", body))
    seconds = time.perf_counter() - began
    assert answer.status == 200, answer.body
    return seconds


def _run(peer: Peer, prompt: list[int]) -> float:
    [(seconds, _, _)] = peer.ask("run", prompts=[prompt], tokens=1)
    return float(seconds)


def _ik(program: Path, model: Path, threads: int, prompt: list[int]) -> float:
    """Have llama-bench compute a prompt as long, after its own warm-up."""
    command = [program, "-m", model, "-t", threads, "-p", len(prompt), "-n", 0, "-r", 1, "-o", "json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    (result,) = json.loads(done.stdout[done.stdout.index("[") :])
    return float(result["avg_ns"]) / 1e9


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
    table = Table(title="prompt tokens a second; times ours over HTTP without a draft", title_justify="left")
    for name in ("", *(f"{length:,}" for length in lengths)):
        table.add_column(name, justify="right" if name else "left")
    ours = speeds[SERVED_PLAIN]
    for name, by_length in speeds.items():
        cells = []
        for length in lengths:
            pairs = [mine / other for mine, other in zip(ours[length], by_length[length], strict=True)]
            ratio = "" if name == SERVED_PLAIN else f"\n{Ratio(statistics.median(pairs), min(pairs), max(pairs))}"
            cells.append(f"{statistics.median(by_length[length]):,.0f}{ratio}")
        table.add_row(name, *cells)
    return table


def _write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_name(f"{path.name}.partial")
    partial_file.write_text(json.dumps({"made": datetime.now(UTC).isoformat(timespec="seconds"), **record}, indent=1))
    partial_file.rename(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="what to serve; programs beside it run the embedded model")
    parser.add_argument("--serve", default="", help="further options of `slipstream serve`")
    parser.add_argument("--peers", default="llama", help="llama, or nothing")
    parser.add_argument("--ik", type=Path, help="a folder with ik_llama.cpp's llama-bench, built by you")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
