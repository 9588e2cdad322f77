"""Do the engine's times add up, and does verification cost what its context makes it cost?

    python benchmarks/shares.py                                          # the embedded model and its draft, on a CPU
    PYTHONPATH=src:benchmarks python benchmarks/shares.py --device cuda  # Llama-8B's shape, random weights, on a GPU

Three looks at the times that `/metrics` and reports are made of, each with and without a draft:

1. answers after a short and a long prompt: prefill, draft, verify, mixed and host beside the wall time around them;
2. one answer token after 32 and after 1,500 prompt tokens: verification has no part in either;
3. a pass at one context length, once filled by a prompt and once by an answer: the first quartile of the passes near
   it, and the fastest, which is what to look at where others use the machine too.
"""

import argparse
import statistics
import time

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.llm import LLM
from slipstream.executors.interface import DecodePass
from slipstream.kernels import select
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

MARGIN = 64
"""Passes so near a context are compared."""


class Watched:
    """An engine whose passes are listened to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.passes: list[DecodePass] = []
        collect = engine.executor.collect

        def collected() -> object:
            output = collect()
            self.passes += output.passes
            return output

        engine.executor.collect = collected  # type: ignore[method-assign, assignment]

    def answer(self, num_prompt: int, num_answer: int, count: int = 1) -> tuple[float, dict[str, float]]:
        """Answer prompts of random tokens, all at once; return the wall time and that of each phase."""
        generator = torch.Generator().manual_seed(num_prompt)
        params = SamplingParams(max_tokens=num_answer, ignore_eos=True, temperature=0.8)
        self.engine.forget_prompts()
        self.passes.clear()
        before, started = dict(self.engine.stats.phase_seconds), time.perf_counter()
        for seed in range(count):
            tokens = torch.randint(10, self.engine.vocab_size - 10, (num_prompt,), generator=generator).tolist()
            self.engine.add(tokens, params, seed)
        while self.engine.has_work:
            self.engine.step()
        self.engine.rest()
        wall_s = time.perf_counter() - started
        return wall_s, {phase: spent - before[phase] for phase, spent in self.engine.stats.phase_seconds.items()}

    def show(self, num_prompt: int, num_answer: int, count: int = 1) -> None:
        """Print what such answers took, phase by phase."""
        wall_s, seconds = self.answer(num_prompt, num_answer, count)
        parts = "  ".join(f"{phase} {spent:.3f}" for phase, spent in seconds.items())
        apart = abs(sum(seconds.values()) / wall_s - 1)
        print(f"  {num_prompt} + {num_answer} x{count}: {parts} s; wall {wall_s:.3f} s, {apart:.2%} apart", flush=True)


def make_engine(device: str, drafted: bool, max_context: int) -> Engine:
    """Return an engine that drafts chains of three or nothing: the embedded model's, or of Llama-8B's shape."""
    if device == "cpu":
        return LLM(
            "embedded", draft="auto" if drafted else None, tree=TreeShape.chain(3), max_context=max_context
        ).engine
    from gpu import acceptance_rates
    from gpu_models import LLAMA_8B, engine_of, random_draft, random_target

    with torch.inference_mode():
        target = random_target(LLAMA_8B, torch.bfloat16, torch.device(device))
        draft = random_draft(target, 32000) if drafted else None
        config = EngineConfig(max_context=max_context, max_requests=4, max_batch_tokens=2048, cuda_graphs="on")
        engine = engine_of(target, draft, select(torch.device(device), "auto"), config, 3 if drafted else 0)
    engine.simulate_acceptance(acceptance_rates() if drafted else ())
    return engine


def look(watched: Watched, args: argparse.Namespace) -> None:
    """Print the three looks."""
    for length in (64, *args.prompts, 1500, 32):  # kernels are compiled, and steps captured, when first needed
        watched.answer(length, 64 if length != 32 else 1, args.count)
    for length in args.prompts:
        watched.show(length, 64, args.count)
    for length in (32, 1500):
        watched.show(length, 1)
    near: dict[str, list[DecodePass]] = {"prompt": [], "answer": []}
    for _ in range(3):  # in turns, since other work on the machine comes and goes
        for name, prompt, answer in (("prompt", args.at - MARGIN, 2 * MARGIN), ("answer", 32, args.at + MARGIN)):
            watched.answer(prompt, answer)
            near[name] += [one for one in watched.passes if abs(one.context - args.at) <= MARGIN]
    times = {name: [one.verify_s * 1e3 for one in passes] for name, passes in near.items()}
    found = {name: (statistics.quantiles(ms, n=4)[0], min(ms)) for name, ms in times.items()}
    for name, (quartile, best) in found.items():
        print(f"  filled by {name}: verify {quartile:.3f} ms, {best:.3f} at best ({len(times[name])} passes)")
    ratio, best = (by_answer / by_prompt for by_prompt, by_answer in zip(*found.values(), strict=True))
    print(f"  a pass at {args.at} tokens: {ratio:.3f}x where the answer filled it, {best:.3f}x at best", flush=True)


def main() -> None:
    """Look at plain decoding, then at decoding with a draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, nargs=2, default=(1024, 7936), help="prompt tokens, short and long")
    parser.add_argument("--at", type=int, default=512, help="the context that prompt or answer fill")
    parser.add_argument("--count", type=int, default=1, help="answers at once, where parts are added up")
    parser.add_argument("--drafts", choices=("plain", "drafted"), nargs="+", default=("plain", "drafted"))
    args = parser.parse_args()
    for name in args.drafts:
        print(f"{name}, {args.device}")
        look(Watched(make_engine(args.device, name == "drafted", max(*args.prompts, 1500) + 128)), args)


if __name__ == "__main__":
    main()
