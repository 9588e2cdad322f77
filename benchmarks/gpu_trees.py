"""Trees on a GPU: every answer must be plain decoding's, its tokens and the bits of their log probabilities.

    python benchmarks/gpu_bundle.py --questions A --questions B --count 400 --out trees.pt        # here
    PYTHONPATH=src:benchmarks python benchmarks/gpu_trees.py --bundle trees.pt --tokens 32          # on the GPU
    PYTHONPATH=src:benchmarks:tests python benchmarks/gpu_trees.py --latent --dense --tokens 32     # tiny targets

With --captured, steps run as graphs, and also choose by themselves what to draft; without, eagerly. Each shape answers
all prompts in float32 and in BF16, greedily and at temperature 0.8 in turns, in batches of 16, and is compared with
plain decoding of the same type, run eagerly.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Literal

import torch

from gpu_models import TINY, random_target, read_bundle
from slipstream.checkpoint.spec import MlaSpec
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.kernels import select
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

MOST = 16
STATIC = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0))
SHAPES = {
    "(5, 4, 16)": TreeShape(depth=5, width=4, budget=16),
    "(7, 8, 32)": TreeShape(depth=7, width=8, budget=32),
    "static": TreeShape(paths=STATIC),
}
AUTOMATIC: dict[str, TreeShape | None] = {"automatic": None}
Answers = list[list[tuple[int, float]]]


def answers(
    target: Target,
    draft: Eagle3Draft | None,
    shape: TreeShape | None,
    prompts: list[list[int]],
    tokens: int,
    captured: bool,
) -> tuple[Answers, float, float]:
    """Return every answer's tokens with their log probabilities, the tokens a pass, and the seconds."""
    device = target.embed_tokens.device
    context = max(map(len, prompts)) + tokens + 64
    mode: Literal["on", "off"] = "on" if captured else "off"
    config = EngineConfig(max_context=context, max_requests=MOST, max_batch_tokens=4096, cuda_graphs=mode)
    engine = build_engine(target, draft, shape, config, select(device))
    if captured and draft is not None and shape is None:
        engine.executor.warm_up()  # what steps take is measured then, and decides
    started = time.perf_counter()
    ids = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, logprobs=0, temperature=0.8 * (index % 2))
        ids[engine.add(prompt, params, index)] = index
    said: Answers = [[] for _ in prompts]
    while engine.has_work:
        for emission in engine.step():
            if emission.error is not None:
                raise emission.error
            for token in emission.tokens:
                assert token.logprob is not None
                said[ids[emission.request_id]].append((token.token_id, token.logprob.logprob))
    return said, engine.stats.acceptance.acceptance_length, time.perf_counter() - started


def compare(name: str, target: Target, draft: Eagle3Draft, prompts: list[list[int]], args: argparse.Namespace) -> int:
    """Print how many answers are the same with each shape; return how many are not."""
    tokens, captured = args.tokens, args.captured
    plain, _, seconds = answers(target, None, None, prompts, tokens, captured=False)
    print(f"{name}: plain {seconds:.1f} s", flush=True)
    wrong = 0
    shapes = {**SHAPES, **(AUTOMATIC if captured else {})}
    for label in args.shapes or shapes:
        shape = shapes[label]
        drafted, length, seconds = answers(target, draft, shape, prompts, tokens, captured)
        same_tokens = sum([t for t, _ in a] == [t for t, _ in b] for a, b in zip(drafted, plain, strict=True))
        same_bits = sum(a == b for a, b in zip(drafted, plain, strict=True))
        wrong += len(prompts) - same_bits
        print(
            f"{name} {label}: tokens equal {same_tokens} of {len(prompts)}, log probabilities too {same_bits}, "
            f"{length:.2f} tokens a pass, {seconds:.1f} s",
            flush=True,
        )
    return wrong


def tiny(kind: str, dtype: torch.dtype, device: torch.device) -> tuple[Target, Eagle3Draft]:
    """Return a random target, dense or latent, that often repeats a token, and a draft that foresees it."""
    from tiny import follower_draft

    spec = dataclasses.replace(TINY, hidden_size=64, num_heads=8, head_dim=64, vocab_size=61)
    rotary_dim = 64
    if kind == "latent":
        mla, rotary_dim = MlaSpec(48, 64, 32, 16, 32, 48**-0.5), 16
        spec = dataclasses.replace(spec, num_heads=16, num_kv_heads=16, head_dim=48, mla=mla)
    rope = dataclasses.replace(spec.rope, rotary_dim=rotary_dim)
    target = random_target(dataclasses.replace(spec, rope=rope), dtype, device)
    target.lm_head.weight.copy_(target.embed_tokens.weight)
    draft = follower_draft(target, hidden_size=64, target_hidden_size=64)
    return target, draft.to(device, dtype)


def main() -> int:
    """Compare; exit status 1 if any answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--latent", action="store_true")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--shapes", nargs="*", help="(5, 4, 16), (7, 8, 32), static, automatic; all unless said")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    device, wrong = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0
    with torch.inference_mode():
        for name in args.dtypes.split(","):
            dtype = getattr(torch, name)
            if args.bundle is not None:
                bundle, target, draft = read_bundle(args.bundle, dtype, device)
                prompts = [prompt[-256:] for prompt in bundle.prompts[: args.count]]
                wrong += compare(f"embedded {name}", target, draft, prompts, args)
            for kind in [kind for kind, asked in (("latent", args.latent), ("dense", args.dense)) if asked]:
                target, draft = tiny(kind, dtype, device)
                generator = torch.Generator().manual_seed(0)
                prompts = [
                    torch.randint(0, 61, (5 + 7 * index % 300,), generator=generator).tolist()
                    for index in range(args.count)
                ]
                wrong += compare(f"{kind} {name}", target, draft, prompts, args)
    print(f"{wrong} answers differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
