"""What copying from the text adds to an EAGLE-3 draft: summaries, retrieval, code edits and JSON; chat and maths.

    python -m benchmarks.copying
    python -m benchmarks.copying --prompts gsm8k/test.jsonl.xz --count 24   # instead, a chain of 3 beside

The embedded model answers prompts of our own several ways in turns: without a draft, with EAGLE-3 alone, with copied
tokens in the same tree, and with a chain of 3 if prompts are given. The texts must be the same. Two figures a kind:
tokens a pass (a decoding pass, the target's own token included) and tokens a second of whole answers, prompts and all
(kept ones, from the second round on). Ratios are of the merged tree to the others, paired in a round; medians and
ranges over rounds. With `--depth` every tree is drafted in full, so tokens a pass do not depend on how busy the machine
is.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream import LLM, TreeShape
from slipstream.train.data.prompts import Messages, read_prompts

COPYING = ("summaries", "retrieval", "code edits", "JSON")
MERGED = "merged"
OWN_PROMPTS = Path(__file__).with_suffix(".jsonl")


@dataclass
class Turn:
    """What came of one kind of prompts in one round."""

    passes: int = 0
    emitted: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_a_pass(self) -> float:
        """Return tokens emitted in a decoding pass."""
        return self.emitted / self.passes

    @property
    def tokens_a_second(self) -> float:
        """Return tokens of all answers in a second."""
        return self.tokens / self.seconds


@dataclass
class Arm:
    """One way to answer, and what came of it by kind of prompt and round."""

    llm: LLM
    turns: dict[tuple[str, int], Turn] = field(default_factory=dict)

    def answer(self, messages: Messages, options: argparse.Namespace, turn: Turn) -> list[int]:
        """Answer a prompt and count."""
        stats = self.llm.engine.stats.acceptance
        passes, emitted = stats.decoding_passes, stats.emitted - stats.prompt_passes
        started = time.perf_counter()
        done = self.llm.chat(messages, max_tokens=options.tokens, temperature=options.temperature, seed=7)
        turn.seconds += time.perf_counter() - started
        turn.passes += stats.decoding_passes - passes
        turn.emitted += stats.emitted - stats.prompt_passes - emitted
        turn.tokens += len(done.tokens)
        return done.token_ids


def main() -> int:
    """Measure and report; exit status 1 if a text differs or a bound is missed."""
    options = _arguments()
    asked = _asked(options)
    arms = _arms(options)
    first_kind = next(iter(asked))
    for arm in arms.values():  # costs are learned and kernels warmed up
        arm.answer(asked[first_kind][0], options, Turn())
    differ = 0
    for number in range(options.rounds):
        for place, (kind, messages) in enumerate((kind, one) for kind, prompts in asked.items() for one in prompts):
            turn = (place + number) % len(arms)
            names = list(arms)[turn:] + list(arms)[:turn]
            texts = [arms[name].answer(messages, options, _turn(arms[name], kind, number)) for name in names]
            differ += any(text != texts[0] for text in texts)
    found = {kind: _figures(arms, kind, options.rounds) for kind in asked}
    for kind, figures in found.items():
        for name, (median, least, most) in figures.items():
            print(f"{kind:12} {name:40} {median:9.3f} ({least:.3f} to {most:.3f})")
    print(f"{options.rounds} rounds, {options.tokens} tokens, {differ} answers differ")
    missed = [
        kind
        for kind, figures in found.items()
        if figures[f"tokens_a_pass, {MERGED} to EAGLE-3"][0] < (1.25 if kind in COPYING else 1.0)
    ]
    return int(differ > 0 or bool(missed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kinds", help="of our own prompts, names with commas; by default all six")
    parser.add_argument("--prompts", type=Path, help="a file's prompts, as `slipstream eval drafts` reads them")
    parser.add_argument("--count", type=int, default=24, help="of the file's prompts")
    parser.add_argument("--earlier", type=int, default=0, help="tokens of earlier answers to copy from")
    parser.add_argument("--depth", type=int, help="chains of this length always; by default as long as it pays")
    parser.add_argument(
        "--copied", type=int, help="copied nodes of a tree at most; by default as pays, 24 with --depth"
    )
    return parser.parse_args()


def _asked(options: argparse.Namespace) -> dict[str, list[Messages]]:
    if options.prompts is not None:
        return {options.prompts.name: read_prompts(options.prompts)[: options.count]}
    asked: dict[str, list[Messages]] = {}
    for one in map(json.loads, OWN_PROMPTS.read_text(encoding="utf-8").splitlines()):
        if options.kinds is None or one["kind"] in options.kinds.split(","):
            asked.setdefault(one["kind"], []).append([{"role": "user", "content": one["prompt"]}])
    return asked


def _arms(options: argparse.Namespace) -> dict[str, Arm]:
    tree = None if options.depth is None else TreeShape.chain(options.depth)
    copied = 24 if options.copied is None and tree is not None else options.copied
    arms = {
        "plain": LLM(options.model, None),
        "EAGLE-3": LLM(options.model, options.draft, tree=tree, copied_tokens=0),
        MERGED: LLM(options.model, options.draft, tree=tree, copied_tokens=copied, earlier_tokens=options.earlier),
    }
    if options.prompts is not None:
        arms["chain of 3"] = LLM(options.model, options.draft, tree=TreeShape.chain(3))
    return {name: Arm(llm) for name, llm in arms.items()}


def _turn(arm: Arm, kind: str, number: int) -> Turn:
    return arm.turns.setdefault((kind, number), Turn())


def _figures(arms: dict[str, Arm], kind: str, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return medians over rounds, with the least and the most."""
    figures = {}
    for what in ("tokens_a_pass", "tokens_a_second"):
        turns = {
            name: [getattr(arm.turns[kind, number], what) for number in range(rounds)] for name, arm in arms.items()
        }
        for name, values in turns.items():
            figures[f"{what}, {name}"] = _spread(values)
        for name in (name for name in arms if name not in (MERGED, "plain")):
            ratios = [merged / other for merged, other in zip(turns[MERGED], turns[name], strict=True)]
            figures[f"{what}, {MERGED} to {name}"] = _spread(ratios)
    return figures


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)


if __name__ == "__main__":
    sys.exit(main())
