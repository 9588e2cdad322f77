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
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream import LLM, TreeShape
from slipstream.train.data.prompts import Messages, read_prompts

_RIVER = (
    "The Aldermoor canal was dug between 1791 and 1804 to carry coal from the pits at Harrow Fell to the port of "
    "Saltby. It is 43 kilometres long and climbs 61 metres through nineteen locks. In its best year, 1838, it carried "
    "210,000 tonnes of coal and lime. The railway reached Saltby in 1846, and within ten years the canal had lost two "
    "thirds of its traffic. The last working boat, the Margaret Ellen, made its final trip in November 1931. Since "
    "1974 volunteers of the Aldermoor Society have restored twelve of the nineteen locks, and in 2009 the upper pound "
    "was opened to pleasure boats. The society hopes to reach Saltby by 2030, if the road bridge at Low Marsh, which "
    "was built across the bed of the canal in 1967, can be raised."
)
_HIVE = (
    "A honey bee colony survives the winter as a cluster. When the temperature in the hive falls below 14 degrees, the "
    "bees crowd together around the queen and shiver their flight muscles to make heat. The bees on the outside of "
    "the cluster form a dense mantle, one to three layers thick, with their heads pointing inward. The temperature in "
    "the centre is kept at about 35 degrees while brood is present and at about 20 degrees otherwise. The cluster "
    "moves slowly through the combs and feeds on stored honey; a strong colony uses between 15 and 20 kilograms from "
    "October to March. A colony rarely dies of cold alone. It dies when the cluster is too small to keep warm, or when "
    "it is separated from its honey by empty combs."
)
_MINUTES = (
    "Minutes of the allotment committee, 4 March. Present: Ruth Okafor (chair), Daniel Price, Mei Tanaka, Jon Hale. "
    "The water tank at the north gate leaks. Daniel Price will ask two plumbers for an offer before 20 March. The rent "
    "for a full plot stays at 46 pounds a year; the rent for a half plot rises from 23 to 25 pounds. Mei Tanaka "
    "reported that eleven people are on the waiting list and that plots 7, 12 and 31 have not been worked since last "
    "summer. The chair will write to the three tenants. Jon Hale asked for a second compost bay beside the shed. The "
    "committee agreed, and set aside 120 pounds for timber. Next meeting: 8 April, half past seven, village hall."
)
_TOTAL = '''def total_price(items, tax_rate):
    """Return the price of all items with tax."""
    total = 0
    for item in items:
        if item.quantity <= 0:
            continue
        price = item.price * item.quantity
        if item.discount:
            price = price - price * item.discount
        total = total + price
    return total + total * tax_rate
'''
_READ = """import csv

def read_scores(path):
    scores = {}
    with open(path) as file:
        reader = csv.reader(file)
        next(reader)
        for row in reader:
            name = row[0]
            score = int(row[1])
            if name in scores:
                scores[name].append(score)
            else:
                scores[name] = [score]
    return scores
"""
_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]

    def size(self):
        return len(self.items)
"""
_ORDERS = (
    '[{"order": 1041, "customer": "Elena Marsh", "city": "Bergen", "status": "shipped", "total": 84.50},\n'
    ' {"order": 1042, "customer": "Tomas Lind", "city": "Oslo", "status": "pending", "total": 19.90},\n'
    ' {"order": 1043, "customer": "Amina Yusuf", "city": "Bergen", "status": "shipped", "total": 240.00},\n'
    ' {"order": 1044, "customer": "Peter Novak", "city": "Stavanger", "status": "returned", "total": 55.25}]'
)
PROMPTS: dict[str, Sequence[str]] = {
    "summaries": [
        f"Summarize the text in three sentences, using its own words.\n\n{_RIVER}",
        f"Summarize the text in three sentences, using its own words.\n\n{_HIVE}",
        f"Summarize these minutes for somebody who was not there.\n\n{_MINUTES}",
        f"Write the key facts of this text as a list.\n\n{_RIVER}",
        f"Write the key facts of this text as a list.\n\n{_HIVE}",
        f"Shorten this text to half its length.\n\n{_RIVER}",
    ],
    "retrieval": [
        f"{_RIVER}\n\nQuote the sentences of the text that speak of the railway and of the last boat.",
        f"{_HIVE}\n\nQuote the passage that says what the bees do when it is cold.",
        f"{_MINUTES}\n\nQuote what was decided about the rent and the compost bay.",
        f"{_HIVE}\n\nHow much honey does a strong colony use, and when does a colony die? Quote the text.",
        f"{_MINUTES}\n\nWho will do what? Quote the minutes for each person.",
        f"{_RIVER}\n\nWhat has happened since 1974? Answer with the words of the text.",
    ],
    "code edits": [
        f"Rename the variable total to amount here. Answer with the whole function.\n\n```python\n{_TOTAL}```",
        f"Add a docstring to this function. Answer with the whole file.\n\n```python\n{_READ}```",
        f"Add a method clear that removes all items. Answer with the whole class.\n\n```python\n{_STACK}```",
        f"Add type hints to this function. Answer with the whole function.\n\n```python\n{_TOTAL}```",
        f"Rename the class to Pile. Answer with the whole class.\n\n```python\n{_STACK}```",
        f"Let this function skip rows with no score. Answer with the whole file.\n\n```python\n{_READ}```",
    ],
    "JSON": [
        f"Here are orders as JSON:\n{_ORDERS}\n\nWrite the same JSON with the country, Norway, in every order.",
        f"Here are orders as JSON:\n{_ORDERS}\n\nWrite the shipped orders as JSON.",
        f"Here are orders as JSON:\n{_ORDERS}\n\nWrite the same JSON sorted by total.",
        f"Here are orders as JSON:\n{_ORDERS}\n\nWrite a JSON object for each customer with name, city and total.",
        f"Extract from these minutes a JSON list of tasks with person, task and date.\n\n{_MINUTES}",
        f"Write the facts of this text as JSON with year and event.\n\n{_RIVER}",
    ],
    "chat": [
        "What should I think of before I adopt a dog?",
        "Write a short poem about the sea in winter.",
        "Explain to a child why the sky is blue.",
        "I have an interview tomorrow and I am nervous. What can I do?",
        "Tell me a story about a lighthouse keeper who finds a letter.",
        "What is the difference between a lake and a pond?",
    ],
    "maths": [
        "A baker sells 24 loaves in the morning and twice as many in the afternoon. How many loaves does he sell?",
        "A train travels 180 kilometres in 2 hours and 15 minutes. What is its average speed?",
        "Anna has 5 boxes with 12 pencils each. She gives 17 pencils away. How many are left?",
        "What is the sum of the first twenty odd numbers? Explain each step.",
        "A shirt costs 40 dollars and is reduced by 15 percent, then by another 10 percent. What does it cost?",
        "Solve 3x + 7 = 31 and check the answer.",
    ],
}
COPYING = ("summaries", "retrieval", "code edits", "JSON")


MERGED = "merged"


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
    parser.add_argument("--kinds", default=",".join(PROMPTS))
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
    return {kind: [[{"role": "user", "content": text}] for text in PROMPTS[kind]] for kind in options.kinds.split(",")}


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
