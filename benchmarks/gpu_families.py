"""Same tokens on a GPU with every kind of target block: one tiny random model of each, with drafts and without.

    PYTHONPATH=src python benchmarks/gpu_families.py --limit-s 110

Of each kind (sinks and windows, chunks, a cap on logits, heads that differ by block, biased experts with a clamped
SwiGLU, other experts, latents, sections of rotary positions, windows in every block) requests are answered one at a
time without a draft; then together, arriving at random, in chunks, with too few pages for all: without a draft, with
n-grams, with an EAGLE-3 chain and with a tree, both step by step and captured, and once more on the pages the first
round left. T = 0 and T = 1 with top-p. Every token must be the same. In brackets: tokens a pass, and requests that were
preempted.
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.spec import DraftSpec, RopeSpec
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.kernels import Ops, select
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

KINDS = Path(__file__).with_suffix(".json")  # a config.json of each
CHAIN, TREE = TreeShape.chain(3), TreeShape(depth=3, width=3, budget=8)
Item = tuple[list[int], SamplingParams, int]


def main() -> int:
    """Compare every kind, as long as there is time."""
    args = _arguments()
    began, failed = time.perf_counter(), 0
    device = torch.device(args.device)
    ops = select(device)
    for name, config in json.loads(KINDS.read_text(encoding="utf-8")).items():
        if args.only and args.only.lower() not in name.lower():
            continue
        if time.perf_counter() - began > args.limit_s:
            sys.stdout.write(f"{name}: left out, no time\n")
            failed += 1
            continue
        started = time.perf_counter()
        found = _compare(config, device, ops, args)
        wrong = [way for way, (count, _) in found.items() if count]
        failed += bool(wrong)
        line = ", ".join(f"{way} {count} [{how}]" for way, (count, how) in found.items())
        seconds = time.perf_counter() - started
        sys.stdout.write(f"{'FAILED' if wrong else 'same'}  {name}: answers that differ: {line} ({seconds:.0f} s)\n")
        sys.stdout.flush()
    sys.stdout.write(f"{failed} kinds failed; {time.perf_counter() - began:.0f} s on {_name(device)}\n")
    return min(failed, 1)


def _compare(
    config: dict[str, object], device: torch.device, ops: Ops, args: argparse.Namespace
) -> dict[str, tuple[int, str]]:
    """Return how many answers differ from plain decoding, for each way to decode, and what happened on the way."""
    target = _target(config, device, getattr(torch, args.dtype))
    draft = _draft(target)
    work = _work(args.requests, args.tokens)
    roomy = EngineConfig(max_context=64, page_size=4, max_requests=2, max_batch_tokens=64, cuda_graphs="off")
    # Chunks of a prompt, and pages for two requests of the three that run: the newest is preempted.
    tight = dataclasses.replace(roomy, max_requests=3, max_batch_tokens=16, num_pages=20)
    plain = build_engine(target, None, CHAIN, roomy, ops)
    expected = [_drive(plain, [item], 0)[0] for item in work]
    ways = {
        "none": (None, CHAIN, tight),
        "n-gram": ("ngram", CHAIN, tight),
        "chain": (draft, CHAIN, tight),
        "captured chain": (draft, CHAIN, dataclasses.replace(tight, cuda_graphs="auto")),
        "tree": (draft, TREE, tight),
        "captured tree": (draft, TREE, dataclasses.replace(tight, cuda_graphs="auto")),
    }
    found: dict[str, tuple[int, str]] = {}
    for way, (drafter, shape, settings) in ways.items():
        engine = build_engine(target, drafter, shape, settings, ops)
        answers = _drive(engine, work, 1) + _drive(engine, work, 2)  # the second time on cached pages
        differ = sum(answer != plain for answer, plain in zip(answers, expected * 2, strict=True))
        stats = engine.stats
        found[way] = differ, f"{stats.acceptance.acceptance_length:.2f}, {stats.preemptions}"
    return found


def _work(requests: int, tokens: int) -> list[Item]:
    generator = torch.Generator().manual_seed(3)
    settings = (SamplingParams(max_tokens=tokens, temperature=0.0), SamplingParams(max_tokens=tokens, top_p=0.9))
    return [
        (torch.randint(0, 101, (12 + 5 * i,), generator=generator).tolist(), settings[i % 2], i)
        for i in range(requests)
    ]


def _target(config: dict[str, object], device: torch.device, dtype: torch.dtype) -> Target:
    target = Target(model_spec(config, Path("tiny")))
    _randomise(target, 0)
    return target.to(device, dtype).eval()


def _draft(target: Target) -> Eagle3Draft:
    """Return a draft that repeats what the target said last, which a tiny random target often does."""
    width, vocab, last = target.spec.hidden_size, target.spec.vocab_size, target.spec.num_layers
    draft = Eagle3Draft(
        DraftSpec(
            "LlamaForCausalLMEagle3", vocab, vocab, width, width, 48, 1, 4, 2, 16, 1e-6, RopeSpec(1e6, 16), 256,
            (last, last, last),
        )
    )  # fmt: skip
    _randomise(draft, 1)
    draft.to(target.embed_tokens.device, target.embed_tokens.dtype)
    with torch.no_grad():
        draft.fc.weight.zero_()
        draft.fc.weight[:, :width].copy_(torch.eye(width))
        for layer in draft.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        draft.norm.weight.copy_(target.norm.weight)
        draft.lm_head.weight.copy_(target.lm_head.weight)
    draft.share_embedding(target.embed_tokens)
    return draft.eval()


def _randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.15 * noise if value.dim() == 1 else 0.15 * noise)


def _drive(engine: Engine, work: list[Item], seed: int) -> list[list[int]]:
    """Add requests at random moments and step until all have ended."""
    order, waiting = random.Random(seed), list(enumerate(work))
    names: dict[int, int] = {}
    answers: list[list[int]] = [[] for _ in work]
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or order.random() < 0.4):
            index, (prompt, params, own) = waiting.pop(0)
            names[engine.add(prompt, params, own)] = index
        for emission in engine.step():
            answers[names[emission.request_id]] += [token.token_id for token in emission.tokens]
        engine.check_invariants()
    return answers


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--limit-s", type=float, default=110.0, help="start no other kind after so many seconds")
    parser.add_argument("--only", help="kinds whose name has this in it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
