"""One stream on a GPU: the embedded model with its draft, what steps choose by themselves beside chains of three.

    python benchmarks/gpu_bundle.py --questions A --questions B --count 400 --out trees.pt                    # here
    PYTHONPATH=src:benchmarks python benchmarks/gpu_stream.py --bundle trees.pt --sets GSM8K,chat --out stream.json

Every question is answered by each in turns, greedily, in BF16, one at a time; the texts must be the same. A rate is
tokens over seconds of whole answers, their prompts included. The first questions of each set only warm up.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_models import read_bundle
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.kernels import select
from slipstream.speculation.choosing import named
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

WARM = 2


def answer(engine: Engine, prompt: list[int], tokens: int, end_tokens: tuple[int, ...]) -> tuple[list[int], float]:
    """Return an answer and its seconds."""
    started = time.perf_counter()
    engine.add(prompt, SamplingParams(max_tokens=tokens), 0, end_tokens)
    said: list[int] = []
    while engine.has_work:
        for emission in engine.step():
            if emission.error is not None:
                raise emission.error
            said += [token.token_id for token in emission.tokens]
    return said, time.perf_counter() - started


def noted(engine: Engine, chosen: dict[str, int]) -> None:
    """Have it counted how often an engine's steps choose what."""
    assert isinstance(engine.executor, GraphExecutor)
    controller = engine.executor._menu.controller
    assert controller is not None
    choose = controller.choose

    def choose_and_count(*args: Any) -> TreeShape | None:
        choice = choose(*args)
        chosen[named(choice)] = chosen.get(named(choice), 0) + 1
        return choice

    controller.choose = choose_and_count  # type: ignore[method-assign]


def measure(
    engines: Mapping[str, Engine], prompts: Sequence[list[int]], tokens: int, ends: tuple[int, ...], until: float
) -> dict[str, Any]:
    """Answer questions by every engine in turns; return rates, and how many texts were the same."""
    seconds, emitted = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    count = same = 0
    for index, prompt in enumerate(prompts):
        if time.perf_counter() > until:
            break
        names = list(engines) if index % 2 else list(engines)[::-1]
        answers = {name: answer(engines[name], prompt, tokens, ends) for name in names}
        if index < WARM:
            continue
        count, same = count + 1, same + (len({tuple(said) for said, _ in answers.values()}) == 1)
        for name, (said, taken) in answers.items():
            seconds[name] += taken
            emitted[name] += len(said)
    rates = {name: round(emitted[name] / seconds[name], 1) for name in engines if seconds[name]}
    beside = {name: round(rates["automatic"] / rate, 4) for name, rate in rates.items()}
    return {"questions": count, "same_texts": same, "tokens_a_second": rates, "automatic_beside": beside}


def main() -> int:
    """Measure; exit status 1 if texts differ or the automatic choice is below the chain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--sets", default="GSM8K,chat", help="names of the bundle's equally large sets of questions")
    parser.add_argument("--count", type=int, default=60, help="questions of each set")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--limit", type=float, default=55.0, help="seconds after which nothing further is begun")
    parser.add_argument("--out", type=Path, default=Path("stream.json"))
    args = parser.parse_args()
    started, device = time.perf_counter(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sets, found, good = args.sets.split(","), {}, True
    with torch.inference_mode():
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        bundle, target, draft = read_bundle(args.bundle, dtype, device)
    config = EngineConfig(
        max_context=max(map(len, bundle.prompts)) + args.tokens + 64,
        max_requests=1,
        prefix_cache=False,
        cuda_graphs="on",
    )
    arms = {"automatic": (draft, None), "chain of 3": (draft, TreeShape.chain(3)), "no draft": (None, None)}
    engines = {}
    for name, (drafting, shape) in arms.items():
        engines[name] = build_engine(target, drafting, shape, config, select(device))
        print(name, *engines[name].executor.warm_up(), f"{time.perf_counter() - started:.0f} s", sep="; ", flush=True)
    executor = engines["automatic"].executor
    if device.type != "cuda" and isinstance(executor, GraphExecutor):
        with torch.inference_mode():
            executor._prepared.measure()
    chosen: dict[str, int] = {}
    noted(engines["automatic"], chosen)
    each = len(bundle.prompts) // len(sets)
    left = args.limit - (time.perf_counter() - started)
    for number, name in enumerate(sets):
        chosen.clear()
        until = started + args.limit - left * (len(sets) - number - 1) / len(sets)
        prompts = bundle.prompts[number * each :][: min(each, args.count)]
        found[name] = {**measure(engines, prompts, args.tokens, bundle.end_tokens, until), "chosen": dict(chosen)}
        good = good and found[name]["same_texts"] == found[name]["questions"]
        good = good and found[name]["automatic_beside"].get("chain of 3", 0.0) >= 1.0
        found[name]["why"] = engines["automatic"].executor.explain()
        print(name, json.dumps(found[name]), flush=True)
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{time.perf_counter() - started:.0f} s")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
