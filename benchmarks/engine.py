"""Plain decoding of our engine beside transformers' `generate`, on the embedded model, float32, in one run.

    python benchmarks/engine.py [--threads 2] [--tokens 64] [--repeats 5]

Both decode greedily from the same prompts for the same number of tokens; the two take turns, so that a noisy machine
is noisy for both. Figures are ratios of medians: absolute times mean nothing on a shared machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers

from slipstream.checkpoint.embedded_folder import embedded_folder
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.kernels import KERNEL_CHOICES, select
from slipstream.models.load import load_target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

PROMPT_TOKENS = 32


def main() -> None:
    """Measure batch 1 and 8, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", choices=KERNEL_CHOICES, default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = embedded_folder()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_target(open_checkpoint(folder), torch.float32, torch.device("cpu"), max_position=512)
    ops = select(torch.device("cpu"), args.kernels)
    print(f"kernels: {ops.promise}")
    print(f"{'batch':>5} {'slipstream tok/s':>18} {'transformers tok/s':>20} {'ratio':>7}")
    for batch in (1, 8):
        prompts = torch.randint(1000, 40000, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(batch))
        engine = build_engine(
            ours, None, TreeShape(), EngineConfig(max_context=256, max_requests=batch, prefix_cache=False), ops
        )
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(args.repeats + 1):
            seconds["ours"].append(_timed(partial(_ours, engine, prompts.tolist(), args.tokens)))
            seconds["theirs"].append(_timed(partial(_theirs, theirs, prompts, args.tokens)))
        speeds = {who: batch * args.tokens / statistics.median(times[1:]) for who, times in seconds.items()}
        print(
            f"{batch:>5} {speeds['ours']:>18.1f} {speeds['theirs']:>20.1f} {speeds['ours'] / speeds['theirs']:>6.2f}x"
        )


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _ours(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), 0)
    while engine.has_work:
        engine.step()


def _theirs(model: transformers.PreTrainedModel, prompts: torch.Tensor, tokens: int) -> None:
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )


if __name__ == "__main__":
    main()
