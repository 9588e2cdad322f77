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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from slipstream.engine.engine import Engine
from slipstream.executors.interface import DecodePass, StepOutput
from slipstream.speculation.sampling import SamplingParams

MARGIN = 64
"""Passes so near a context are compared."""
PHASES = ("prefill", "draft", "verify", "mixed", "host")


@dataclass
class Spell:
    """What was measured between two moments."""

    wall_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    passes: list[DecodePass] = field(default_factory=list)

    def row(self) -> str:
        """Return it as a line."""
        parts = " ".join(f"{self.seconds[phase]:8.3f}" for phase in PHASES)
        return f"{parts}   sum {sum(self.seconds.values()):7.3f} s, wall {self.wall_s:7.3f} s"


class Watched:
    """An engine whose passes are listened to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._passes: list[DecodePass] = []
        collect = engine.executor.collect

        def collected() -> StepOutput:
            output = collect()
            self._passes += output.passes
            return output

        engine.executor.collect = collected  # type: ignore[method-assign]

    @contextmanager
    def spell(self) -> Iterator[Spell]:
        """Measure what happens meanwhile."""
        spell, before = Spell(), dict(self.engine.stats.phase_seconds)
        self._passes.clear()
        started = time.perf_counter()
        yield spell
        spell.wall_s = time.perf_counter() - started
        spell.seconds = {phase: self.engine.stats.phase_seconds[phase] - before[phase] for phase in PHASES}
        spell.passes = self._passes[:]

    def answer(self, num_prompt: int, num_answer: int, count: int = 1) -> Spell:
        """Answer prompts of random tokens, all at once."""
        generator = torch.Generator().manual_seed(num_prompt)
        params = SamplingParams(max_tokens=num_answer, ignore_eos=True, temperature=0.8)
        self.engine.forget_prompts()
        with self.spell() as spell:
            for seed in range(count):
                tokens = torch.randint(10, self.engine.vocab_size - 10, (num_prompt,), generator=generator).tolist()
                self.engine.add(tokens, params, seed)
            while self.engine.has_work:
                self.engine.step()
            self.engine.rest()
        return spell


def embedded(drafted: bool, max_context: int) -> Engine:
    """Return the embedded model's engine on this CPU, with chains of three or without a draft."""
    from slipstream.engine.llm import LLM
    from slipstream.speculation.tree import TreeShape

    draft = "auto" if drafted else None
    return LLM("embedded", draft=draft, tree=TreeShape.chain(3), max_context=max_context).engine


def llama(drafted: bool, max_context: int) -> Engine:
    """Return an engine of Llama-8B's shape on the GPU, with chains of three kept at the usual rates or without."""
    from gpu import acceptance_rates
    from gpu_models import LLAMA_8B, engine_of, random_draft, random_target
    from slipstream.engine.config import EngineConfig
    from slipstream.kernels import select

    device = torch.device("cuda")
    with torch.inference_mode():
        target = random_target(LLAMA_8B, torch.bfloat16, device)
        draft = random_draft(target, 32000) if drafted else None
        config = EngineConfig(max_context=max_context, max_requests=4, max_batch_tokens=2048, cuda_graphs="on")
        engine = engine_of(target, draft, select(device, "auto"), config, 3 if drafted else 0)
    engine.simulate_acceptance(acceptance_rates() if drafted else ())
    return engine


def look(watched: Watched, lengths: tuple[int, int], at: int, count: int) -> None:
    """Print the three looks."""
    for length in (64, *lengths, 1500):  # kernels are compiled, and steps captured, when they are first needed
        watched.answer(length, 64, count)
    for length in (32, 1500):
        watched.answer(length, 1)
    print(f"    {'':18}{' '.join(f'{phase:>8}' for phase in PHASES)}")
    for length in lengths:
        spell = watched.answer(length, 64, count)
        off = abs(sum(spell.seconds.values()) / spell.wall_s - 1)
        print(f"    {length:5} + 64 x{count:<6}  {spell.row()}: {off:.2%} apart", flush=True)
    for length in (32, 1500):
        print(f"    {length:5} + 1           {watched.answer(length, 1).row()}", flush=True)
    passes: dict[str, list[DecodePass]] = {"prompt": [], "answer": []}
    for _ in range(3):  # in turns, since other work on the machine comes and goes
        passes["prompt"] += watched.answer(at - MARGIN, 2 * MARGIN).passes
        passes["answer"] += watched.answer(32, at + MARGIN).passes
    found = []
    for name, timed in passes.items():
        near = [one for one in timed if abs(one.context - at) <= MARGIN]
        times = [one.verify_s * 1e3 for one in near]
        best, quartile = min(times), statistics.quantiles(times, n=4)[0]
        drafting = statistics.quantiles([one.draft_s * 1e3 for one in near], n=4)[0]
        found.append((best, quartile))
        print(
            f"    filled by {name}: verify {quartile:7.3f} ms, {best:7.3f} at best, draft {drafting:7.3f} ms "
            f"({len(near)} passes)",
            flush=True,
        )
    by_prompt, by_answer = found
    print(
        f"    a pass at {at} tokens: {by_answer[1] / by_prompt[1]:.3f}x as long where the answer filled it, "
        f"{by_answer[0] / by_prompt[0]:.3f}x at best",
        flush=True,
    )


def main() -> None:
    """Look at plain decoding, then at decoding with a draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, nargs=2, default=(1024, 7936), help="prompt tokens, short and long")
    parser.add_argument("--at", type=int, default=512, help="the context that prompt or answer fill")
    parser.add_argument("--count", type=int, default=1, help="answers at once, where parts are added up")
    parser.add_argument("--drafts", choices=("plain", "drafted"), nargs="+", default=("plain", "drafted"))
    args = parser.parse_args()
    make = embedded if args.device == "cpu" else llama
    for name in args.drafts:
        print(f"{name}, {args.device}")
        engine = make(name == "drafted", max(args.prompts) + 128)
        look(Watched(engine), tuple(args.prompts), args.at, args.count)
        del engine


if __name__ == "__main__":
    main()
