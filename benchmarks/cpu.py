"""Decoding on a CPU beside llama.cpp, vLLM and transformers: one run, the same prompts, taking turns.

    python benchmarks/cpu.py --gsm8k gsm8k/test.jsonl.xz --out out/cpu.json

The embedded model decodes greedily: our engine from the GGUF as stored, plain and with the shipped EAGLE-3 draft;
llama.cpp from the same file and from Q4_0 and Q8_0 made of it; vLLM's CPU build, plain and with the same draft;
transformers in float32. Given a draft that llama.cpp can compute (--llama-draft; not the shipped one, which is of
EAGLE-3.1), its own EAGLE-3 decodes the same file with it at batch 1, and so does our engine. Every program is loaded
once in a process (but for ours and transformers, an environment) of its own, with as many threads, is given the same
token ids and asked for as many tokens; in every round each takes its
turn, so that what else the machine does falls on all. llama.cpp is compiled and vLLM installed on first use.

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

from peers.arms import PLAIN, Arm, Decoded, Limits, Models, all_arms, decoded, start
from peers.tables import Point, Results, Turn, aims_table
from slipstream.bench.hardware import find_hardware
from slipstream.bench.peers.environments import environments_dir
from slipstream.bench.peers.process import Peer, PeerError
from slipstream.checkpoint.draft_gguf import write_gguf_draft
from slipstream.checkpoint.embedded import GGUF_FILE, embedded_draft
from slipstream.checkpoint.embedded_folder import embedded_folder
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.cli.peers import draft_for_vllm
from slipstream.records.store import sha256_of
from slipstream.train.data.prompts import read_prompts

ROOT = Path(__file__).resolve().parents[1]
CHAT = ROOT / "recipes/bench/prompts/mixed.jsonl"
QUESTIONS = Path(__file__).parent / "peers/questions.jsonl"
POINTS = (Point("chat", 1), Point("gsm8k", 1), Point("chat", 8), Point("gsm8k", 8))
CONTEXT = 1024
CANDIDATES = 64  # prompts looked at for answers that are long enough
SETTLE_S = 0.3  # OpenMP's threads spin for a while after their work; the next program shall not meet them


def main() -> int:
    """Load everybody, let them take turns, and show what came of it."""
    args = _arguments()
    console = Console()
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cpus)  # inherited by every peer
    limits = Limits(len(cpus), CONTEXT, max(point.batch for point in POINTS))
    wanted = ["slipstream", *(args.peers.split(",") if args.peers else [])]
    arms = [
        arm
        for arm in all_arms(_models(args.llama_draft), limits, args.depths, args.vllm_dtypes)
        if arm.program in wanted
    ]
    with ExitStack() as stack:
        peers = _load(console, stack, arms)
        engine = peers[PLAIN]
        files = {"chat": CHAT, "gsm8k": args.gsm8k}
        prompts = {name: _prompts(engine, path, args.tokens) for name, path in files.items()}
        turns, bandwidths = _rounds(console, arms, peers, prompts, args)
    bandwidth = statistics.median(bandwidths)
    floors = {arm.name: bandwidth / _weight_bytes(arm, peers[arm.name]) for arm in arms if arm.name in peers}
    results = Results(turns, floors)
    console.print(f"reading memory: {bandwidth / 1e9:.1f} GB/s; {limits.threads} threads; {args.rounds} rounds")
    for point in results.points:
        console.print(results.table(point))
    console.print(aims_table(results.aims()))
    if args.out is not None:
        about = {name: peer.about for name, peer in peers.items()}
        _write(args.out, {"settings": {name: str(value) for name, value in vars(args).items()}, "peers": about,
                          "hardware": asdict(find_hardware()), "bandwidth_bytes_s": bandwidths, "floors_tok_s": floors,
                          "aims": [asdict(aim) for aim in results.aims()],
                          "turns": [asdict(turn) for turn in turns]})  # fmt: skip
        console.print(f"record: {args.out}")
    return 0


def _models(llama_draft: Path | None) -> Models:
    shipped, folder = embedded_draft(), embedded_folder()
    if shipped is None:
        sys.exit("This copy of slipstream ships no draft for the embedded model.")
    older = None
    if llama_draft is not None:
        file = environments_dir() / "models" / f"{llama_draft.name}-{sha256_of([str(llama_draft.resolve())])[:8]}.gguf"
        file.unlink(missing_ok=True)
        write_gguf_draft(open_checkpoint(llama_draft), folder / GGUF_FILE, file)
        older = llama_draft, file
    return Models(folder, shipped, draft_for_vllm(), older)


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


def _prompts(engine: Peer, path: Path, tokens: int) -> list[list[int]]:
    """Return prompts whose answers do not end before `tokens`: what follows an end is not text."""
    ids = engine.ask("encode", messages=read_prompts(path)[:CANDIDATES])
    lengths = engine.ask("lengths", prompts=ids, tokens=tokens)
    kept = [prompt for prompt, length in zip(ids, lengths, strict=True) if length == tokens]
    if len(kept) < max(point.batch for point in POINTS):
        sys.exit(f"{path}: only {len(kept)} prompts have answers of {tokens} tokens; lower --tokens.")
    return kept


def _rounds(
    console: Console, arms: list[Arm], peers: dict[str, Peer], prompts: dict[str, list[list[int]]],
    args: argparse.Namespace,
) -> tuple[list[Turn], list[float]]:  # fmt: skip
    """Let every arm take its turn at every point, round after round; the first, short round only warms up."""
    turns, bandwidths = [], []
    present = [arm for arm in arms if arm.name in peers]
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=args.rounds * len(POINTS) * len(present))
        for number in range(-1, args.rounds):
            if number >= 0:
                bandwidths.append(peers[PLAIN].ask("read_memory"))
            for point in POINTS:
                asked = _chosen(prompts[point.prompts], max(number, 0), max(point.batch, args.prompts))
                groups = [asked[i : i + point.batch] for i in range(0, len(asked), point.batch)]
                ours: list[list[int]] = []
                for arm in present:
                    if arm.alone and point.batch > 1:
                        bar.advance(task, number >= 0)
                        continue
                    bar.update(task, description=f"round {number + 1}: {point}, {arm.name}")
                    time.sleep(SETTLE_S)
                    done = _turn(peers[arm.name], groups, 8 if number < 0 else args.tokens)
                    ours = ours or [answer for one in done for answer in one.answers]
                    if number >= 0:
                        turns.append(_record(number, point, arm, done, ours))
                        bar.advance(task)
    return turns, bandwidths


def _chosen(prompts: list[list[int]], number: int, count: int) -> list[list[int]]:
    """Return a round's prompts: each round goes on where the last one ended."""
    return [prompts[(number * count + i) % len(prompts)] for i in range(count)]


def _turn(peer: Peer, groups: list[list[list[int]]], tokens: int) -> list[Decoded]:
    return [decoded(peer.ask("run", prompts=group, tokens=tokens), len(group), tokens) for group in groups]


def _record(number: int, point: Point, arm: Arm, done: list[Decoded], ours: list[list[int]]) -> Turn:
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


def _weight_bytes(arm: Arm, peer: Peer) -> int:
    return peer.about["weight_bytes"] if arm.weight_bytes is None else arm.weight_bytes


def _write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"made": datetime.now(UTC).isoformat(timespec="seconds"), **record}, indent=1))
    partial.rename(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="llama,vllm,transformers", help="who to measure beside, comma-separated")
    parser.add_argument("--gsm8k", type=Path, default=QUESTIONS, help="questions; a few of our own by default")
    parser.add_argument(
        "--llama-draft", type=Path, help="a draft for llama.cpp, trained with draft.feature_norm=none and "
        "draft.feedback=pre_norm; it and our engine decode with it at batch 1",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2, help="prompts a round at batch 1")
    parser.add_argument("--depths", type=int, nargs="+", default=[0], help="chains our EAGLE-3 arms draft; 0: as pays")
    parser.add_argument("--vllm-dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that everything runs")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.prompts = 1, 24, 1
    return args


if __name__ == "__main__":
    sys.exit(main())
