"""Are the tokens with a draft those without? Token for token, greedy and seeded, on real questions.

    python benchmarks/lossless.py --questions ../shared/data/gsm8k/test.jsonl.xz --count 200 --draft ngram

Every question is answered twice by the offline engine, with the draft and without; the first difference of each
question, if there is one, is shown with the margin between the target's two best tokens there. The questions file is
JSON lines (plain or .xz), as `slipstream train` reads them.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from slipstream.engine.llm import LLM, Completion
from slipstream.engine.loading import LoadOptions
from slipstream.kernels import KERNEL_CHOICES
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.prompts import read_prompts

BATCH = 32


def main() -> int:
    """Answer everything both ways, report, and fail on any difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", choices=KERNEL_CHOICES, default="auto")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    prompts = read_prompts(args.questions)[: args.count]
    tree = TreeShape(args.depth, args.width, args.budget)
    options = {"model": args.model, "dtype": args.dtype, "kernels": args.kernels, "tree": tree}
    plain = LLM(LoadOptions(draft="none", **options))
    drafted = LLM(LoadOptions(draft=args.draft, **options))
    console.print(*drafted.summary, sep="\n", highlight=False)
    differing = 0
    for temperature in args.temperatures:
        different = 0
        stats = AcceptanceStats()
        started = time.perf_counter()
        for start in track(range(0, len(prompts), BATCH), f"temperature {temperature}", console=console):
            params = SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=start, logprobs=2)
            group = prompts[start : start + BATCH]
            for index, (one, two) in enumerate(
                zip(plain.generate(group, params), drafted.generate(group, params), strict=True)
            ):
                stats.add(two.stats)
                if one.token_ids != two.token_ids:
                    different += 1
                    console.print(f"question {start + index}: {describe(one, two)}", highlight=False)
        differing += different
        rates = " ".join(f"{rate:.1%}" for rate in stats.rates)
        console.print(
            f"temperature {temperature}: {len(prompts) - different} of {len(prompts)} identical; acceptance length "
            f"{stats.acceptance_length:.3f}, by position {rates}; {time.perf_counter() - started:.0f} s for both",
            highlight=False,
        )
    return 1 if differing else 0


def describe(plain: Completion, drafted: Completion) -> str:
    """Say where two answers part, and how near the target was to a tie there."""
    pairs = zip(plain.tokens, drafted.tokens, strict=False)
    at, (one, two) = next((i, pair) for i, pair in enumerate(pairs) if pair[0].token_id != pair[1].token_id)
    assert one.logprob is not None
    (_, best), (_, second) = one.logprob.top
    return (
        f"token {at} is {one.token_id} without and {two.token_id} with a draft; top-two margin {best - second:.2e} nats"
    )


if __name__ == "__main__":
    sys.exit(main())
