"""How many tokens a pass does a draft bring? Measured by the engine itself, on files of prompts.

    python benchmarks/acceptance.py gsm8k=path/to/gsm8k/test.jsonl.xz:200 instructions=path/to/instructions.jsonl

Greedy answers of 128 tokens, a chain of 3 and one of 6 by default, beside n-gram lookup. Answers that loop (some span
of at least 16 tokens three times in a row) make drafting easy, so their share and the figures without them are shown.
Files are JSON lines (plain or .xz), as `slipstream train` reads them.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from slipstream.engine.llm import LLM
from slipstream.engine.loading import LoadOptions
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.prompts import Messages, read_prompts
from slipstream.train.repetition import loop_end

BATCH = 32


def main() -> None:
    """Print a line for each draft, chain length and file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE[:COUNT]")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", nargs="+", default=["auto", "ngram"])
    parser.add_argument("--depth", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=0)
    for draft in args.draft:
        for depth in args.depth:
            llm = LLM(LoadOptions(args.model, draft, TreeShape.chain(depth), dtype=args.dtype))
            for named in args.files:
                name, _, rest = named.partition("=")
                path, _, count = rest.partition(":")
                prompts = read_prompts(Path(path))[: int(count) if count else None]
                console.print(
                    f"{draft:24} K={depth} {name:14} {measure(llm, prompts, params, console)}", highlight=False
                )


def measure(llm: LLM, prompts: list[Messages], params: SamplingParams, console: Console) -> str:
    """Answer all prompts and describe what was accepted."""
    every, straight, looping = AcceptanceStats(), AcceptanceStats(), 0
    for start in track(range(0, len(prompts), BATCH), "answering", console=console, transient=True):
        for completion in llm.generate(prompts[start : start + BATCH], params):
            every.add(completion.stats)
            if loop_end(completion.token_ids) is None:
                straight.add(completion.stats)
            else:
                looping += 1
    rates = " ".join(f"{rate:.3f}" for rate in every.rates)
    return (
        f"{every.acceptance_length:.3f} (without loops {straight.acceptance_length:.3f}; "
        f"{looping / len(prompts):.1%} of {len(prompts)} loop); by position {rates}"
    )


if __name__ == "__main__":
    main()
