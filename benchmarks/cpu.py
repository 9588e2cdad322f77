"""The embedded model on a CPU beside llama.cpp: one run, the same prompts, taking turns.

    python benchmarks/cpu.py --gsm8k gsm8k/test.jsonl.xz --out out/cpu.json

Our engine runs the GGUF as stored, plain and with the shipped EAGLE-3 draft; llama.cpp the same file, and Q4_0 and Q8_0
made of it. Every program is loaded once, in a process of its own, with as many threads, is given the same token ids and
asked for as many tokens, greedily; in every round each takes its turn, so that what else the machine does falls on all.
llama.cpp is compiled on first use. For vLLM's CPU build, over HTTP: `slipstream bench` and
`recipes/bench/embedded-vllm.yaml`.

Decoding speed leaves out the prompts: the clock runs from when every answer of the batch has its first token until the
first answer is complete, and the tokens that come in between are counted; at batch 8 eight are decoding all the while.
The floor is the time it takes to read a program's weights once a token, at the bandwidth measured in the same run.
Ratios are medians over rounds, paired within a round. "text" is the share of tokens before the first that differs from
our plain decoding: formats and roundings differ, but a program that runs another model would show here.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from peers.arms import PLAIN, Arm, Decoded, all_arms, decoded, start
from peers.tables import Point, Results, Turn
from slipstream.bench.hardware import find_hardware
from slipstream.bench.peers.process import Peer, PeerError
from slipstream.checkpoint.embedded import GGUF_FILE, embedded_draft
from slipstream.checkpoint.embedded_folder import embedded_folder
from slipstream.records.store import write_text
from slipstream.train.data.prompts import read_prompts

CHAT = Path(__file__).resolve().parents[1] / "recipes/bench/prompts/mixed.jsonl"
QUESTIONS = Path(__file__).parent / "peers/questions.jsonl"
POINTS = (Point("chat", 1), Point("gsm8k", 1), Point("chat", 8), Point("gsm8k", 8))
CONTEXT = 1024
CANDIDATES = 64  # prompts looked at for answers that are long enough
SETTLE_S = 0.3  # OpenMP's threads spin for a while after their work; the next program shall not meet them
Prompts = list[list[int]]


def main() -> int:
    """Load everybody, let them take turns, and show what came of it."""
    args = _arguments()
    console, draft = Console(), embedded_draft()
    if draft is None:
        sys.exit("This copy of slipstream ships no draft for the embedded model.")
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cpus)  # inherited by every program
    rows = max(point.batch for point in POINTS)
    arms = list(all_arms(embedded_folder() / GGUF_FILE, draft, args.depths, len(cpus), CONTEXT, rows))
    with ExitStack() as stack:
        peers = _load(console, stack, arms)
        present = [arm for arm in arms if arm.name in peers]
        files = {"chat": CHAT, "gsm8k": args.gsm8k}
        prompts = {name: _prompts(peers[PLAIN], path, args.tokens) for name, path in files.items()}
        turns, bandwidths = _rounds(console, present, peers, prompts, args)
    bandwidth = statistics.median(bandwidths)
    floors = {name: bandwidth / peer.about["weight_bytes"] for name, peer in peers.items()}
    results = Results(turns, floors)
    console.print(f"reading memory: {bandwidth / 1e9:.1f} GB/s; {len(cpus)} threads; {args.rounds} rounds")
    for point in results.points:
        console.print(results.table(point))
    if args.out is not None:
        record = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": {name: str(value) for name, value in vars(args).items()},
            "hardware": asdict(find_hardware()),
            "peers": {name: peer.about for name, peer in peers.items()},
            "bandwidth_bytes_s": bandwidths,
            "turns": [asdict(turn) for turn in turns],
        }
        write_text(args.out, json.dumps(record, indent=1))
        console.print(f"record: {args.out}")
    return 0


def _load(console: Console, stack: ExitStack, arms: list[Arm]) -> dict[str, Peer]:
    """Start every arm; one that cannot be started is left out with its reason."""
    peers: dict[str, Peer] = {}
    for arm in arms:
        began = time.perf_counter()
        try:
            with console.status(f"loading {arm.name} (installing it first, if need be)"):
                peers[arm.name] = stack.enter_context(start(arm))
        except PeerError as error:
            if arm.name == PLAIN:
                raise
            console.print(f"[yellow]left out:[/yellow] {arm.name}: {error}", highlight=False)
            continue
        seconds = time.perf_counter() - began
        console.print(f"{arm.name}: {peers[arm.name].about['version']}, loaded in {seconds:.1f} s", highlight=False)
    return peers


def _prompts(engine: Peer, path: Path, tokens: int) -> Prompts:
    """Return prompts whose answers do not end before `tokens`: what follows an end is not text."""
    ids = engine.ask("encode", messages=read_prompts(path)[:CANDIDATES])
    lengths = engine.ask("lengths", prompts=ids, tokens=tokens)
    kept = [prompt for prompt, length in zip(ids, lengths, strict=True) if length == tokens]
    if len(kept) < max(point.batch for point in POINTS):
        sys.exit(f"{path}: only {len(kept)} prompts have answers of {tokens} tokens; lower --tokens.")
    return kept


def _rounds(
    console: Console, arms: list[Arm], peers: dict[str, Peer], prompts: dict[str, Prompts], args: argparse.Namespace
) -> tuple[list[Turn], list[float]]:
    """Let every arm take its turn at every point, round after round; the first, short round only warms up."""
    turns, bandwidths = [], []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=args.rounds * len(POINTS) * len(arms))
        for number in range(-1, args.rounds):
            if number >= 0:
                bandwidths.append(peers[PLAIN].ask("read_memory"))
            for point in POINTS:
                known, count = prompts[point.prompts], max(point.batch, args.prompts)
                # Each round goes on where the last one ended.
                asked = [known[(max(number, 0) * count + i) % len(known)] for i in range(count)]
                groups = [asked[i : i + point.batch] for i in range(0, len(asked), point.batch)]
                ours: Prompts = []
                for arm in arms:
                    bar.update(task, advance=number >= 0, description=f"round {number + 1}: {point}, {arm.name}")
                    time.sleep(SETTLE_S)
                    done = _turn(peers[arm.name], groups, 8 if number < 0 else args.tokens)
                    ours = ours or [answer for one in done for answer in one.answers]
                    if number >= 0:
                        turns.append(_record(number, point, arm, done, ours))
    return turns, bandwidths


def _turn(peer: Peer, groups: list[Prompts], tokens: int) -> list[Decoded]:
    return [decoded(peer.ask("run", prompts=group, tokens=tokens), len(group), tokens) for group in groups]


def _record(number: int, point: Point, arm: Arm, done: list[Decoded], ours: Prompts) -> Turn:
    num_tokens, seconds = sum(one.num_tokens for one in done), sum(one.seconds for one in done)
    answers = [answer for one in done for answer in one.answers]
    return Turn(
        number,
        point,
        arm.name,
        arm.program,
        num_tokens / seconds,
        num_tokens / sum(one.num_passes for one in done),
        statistics.mean(_agreement(*pair) for pair in zip(answers, ours, strict=True)),
        sum(one.whole_seconds for one in done),
    )


def _agreement(answer: list[int], ours: list[int]) -> float:
    same = next((i for i, (a, b) in enumerate(zip(answer, ours, strict=True)) if a != b), len(ours))
    return same / len(ours)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=QUESTIONS, help="questions; a few of our own by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2, help="prompts a round at batch 1")
    parser.add_argument("--depths", type=int, nargs="+", default=[0], help="chains our EAGLE-3 arms draft; 0: as pays")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
