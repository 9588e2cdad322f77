"""Are the tokens with a draft those without? Token for token, greedy and seeded, on real questions.

    python benchmarks/lossless.py --questions gsm8k/test.jsonl.xz --out out/lossless.jsonl

Every question is answered twice by the offline engine, with the draft and without, each from its default precisions
(the embedded model's GGUF as stored, the shipped draft in INT8); the first difference of each question, if there is
one, is shown with the margin between the target's two best tokens there. The questions file is JSON lines (plain or
.xz), as `slipstream train` reads them. With --out each group of questions is written down as it is done, and a run
that was stopped goes on from there.
"""

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream.engine.llm import LLM
from slipstream.kernels import KERNEL_CHOICES
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.data.prompts import Messages, read_prompts


@dataclass
class Group:
    """What came of one group of questions at one temperature, as one line of the file."""

    start: int
    temperature: float
    num_asked: int
    seconds: float
    acceptance: AcceptanceStats
    differences: list[str] = field(default_factory=list)


def main() -> int:
    """Answer everything both ways, report, and fail on any difference."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    console = Console()
    prompts = read_prompts(args.questions)[: args.count]
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("out", "count", "threads")}
    settings["questions"] = hashlib.sha256(args.questions.read_bytes()).hexdigest()
    done = {} if args.out is None else _read(args.out, settings)
    tree = TreeShape(args.depth, args.width, args.budget)
    options = {"model": args.model, "dtype": args.dtype, "kernels": args.kernels, "tree": tree}
    plain, drafted = LLM(draft=None, **options), LLM(draft=args.draft, **options)
    console.print(*drafted.summary, sep="\n", highlight=False)
    # The temperatures of one group follow each other, so that its prompts are still in the prefix cache.
    groups = [(start, t) for start in range(0, len(prompts), args.batch) for t in args.temperatures]
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("answers compared", total=len(prompts) * len(args.temperatures))
        for start, temperature in groups:
            asked = prompts[start : start + args.batch]
            if (start, temperature, len(asked)) not in done:
                params = SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=start)
                group = compare(plain, drafted, asked, params, start)
                done[start, temperature, len(asked)] = group
                if args.out is not None:
                    _append(args.out, asdict(group))
            bar.advance(task, len(asked))
    wanted = [done[start, temperature, len(prompts[start : start + args.batch])] for start, temperature in groups]
    return _report(console, wanted, args.temperatures)


def compare(plain: LLM, drafted: LLM, asked: list[Messages], params: SamplingParams, start: int) -> Group:
    """Answer a group of questions both ways."""
    began = time.perf_counter()
    stats = AcceptanceStats()
    differences = []
    pairs = zip(plain.generate(asked, params), drafted.generate(asked, params), strict=True)
    for index, (one, two) in enumerate(pairs):
        stats.add(two.stats)
        if one.token_ids != two.token_ids:
            where = describe(plain, one.prompt_tokens, one.token_ids, two.token_ids)
            differences.append(f"question {start + index}: {where}")
    return Group(start, params.temperature, len(asked), time.perf_counter() - began, stats, differences)


def describe(plain: LLM, prompt: tuple[int, ...], without: list[int], drafted: list[int]) -> str:
    """Say where two answers part, and how near the target was to a tie there."""
    at = next((i for i, (a, b) in enumerate(zip(without, drafted, strict=False)) if a != b), None)
    if at is None:
        return f"one answer ends after {min(len(without), len(drafted))} tokens and the other goes on"
    (again,) = plain.generate([[*prompt, *without[:at]]], SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True))
    logprob = again.tokens[0].logprob
    assert logprob is not None, "log probabilities were asked for"
    (_, best), (_, second) = logprob.top
    return (
        f"token {at} is {without[at]} without and {drafted[at]} with a draft; top-two margin {best - second:.2e} nats"
    )


def _report(console: Console, groups: list[Group], temperatures: list[float]) -> int:
    """Print a line for each temperature, and every difference; return the exit status."""
    num_different = 0
    for temperature in temperatures:
        mine = [group for group in groups if group.temperature == temperature]
        stats = AcceptanceStats()
        for group in mine:
            stats.add(group.acceptance)
        differences = [line for group in mine for line in group.differences]
        console.print(*differences, sep="\n", end="\n" if differences else "", highlight=False)
        num_asked = sum(group.num_asked for group in mine)
        rates = " ".join(f"{rate:.1%}" for rate in stats.rates)
        seconds = sum(group.seconds for group in mine)
        console.print(
            f"temperature {temperature}: {num_asked - len(differences)} of {num_asked} identical; acceptance length "
            f"{stats.acceptance_length:.3f}, by position {rates}; {seconds:.0f} s for both",
            highlight=False,
        )
        num_different += len(differences)
    return 1 if num_different else 0


def _read(path: Path, settings: dict[str, str]) -> dict[tuple[int, float, int], Group]:
    """Return what an earlier run of the same settings wrote; start the file when there was none."""
    if not path.exists():
        _append(path, settings)
        return {}
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    if first != settings:
        changed = ", ".join(sorted(key for key in settings if first.get(key) != settings[key]))
        sys.exit(f"{path}: was written with another {changed}; name another file with --out, or remove it.")
    groups = [Group(**{**line, "acceptance": AcceptanceStats(**line["acceptance"])}) for line in lines]
    return {(group.start, group.temperature, group.num_asked): group for group in groups}


def _append(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--count", type=int, help="only the first so many questions")
    parser.add_argument("--out", type=Path, help="file to write groups to, and to go on from")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--batch", type=int, default=32, help="questions answered together")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", choices=KERNEL_CHOICES, default="auto")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
