"""Compute what drafting can gain over several requests on a CPU, at its costs here and at others.

    python benchmarks/cpu_drafting.py --gsm8k path/to/gsm8k/test.jsonl.xz [--costs 6.3 0.52 0.2 0.015 0.38 0.18 0.40]

Texts do not depend on drafts, so the draft's chain after every token of an answer can be written down once, with what
the target keeps of it; passes over 8 such answers are then replayed, cut at many floors, depths and needs, and timed by
what a pass and its parts take. The costs are those of the machine in docs/log/cpu.md; `benchmarks/cpu_step.py` and
`stats.phase_seconds` tell another's. The controller is let loose on the same passes, with and without noise.
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from slipstream.checkpoint.embedded import embedded_draft, embedded_model
from slipstream.engine.llm import LLM
from slipstream.kernels import Cut, RoundResult
from slipstream.speculation.controller import ChainController, DraftedChain, DraftedPass, Reach
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from slipstream.train.data.prompts import read_prompts

ROOT = Path(__file__).resolve().parents[1]
CHAT = ROOT / "recipes/bench/prompts/mixed.jsonl"
DEPTH, TOKENS, BATCH = 5, 64, 8
AT_ONCE = 16  # positions of an answer looked at together
CANDIDATES, ANSWERS = 64, 40
PASSES, ORDERS = 300, 3
CONTROLLER_PASSES, CONTROLLER_ORDERS = 2000, 10
DEPTHS, FLOORS, NEEDS = (1, 2, 3, 5), (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), (0.2, 0.5, 1.0)
PLAIN = Reach(0, Cut(math.inf), follows=False)


@dataclass(frozen=True)
class Chain:
    """A chain drafted after some token: cumulative log-probabilities, and how many of its tokens the target keeps."""

    scores: Sequence[float]
    kept: int


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a pass over 8 requests.

    Of checking their roots, and a row more; of a level, and each chain in it; of following; of the Python between
    passes, without a draft and with one.
    """

    roots: float
    row: float
    level: float
    chain: float
    follow: float
    plain_python: float
    drafted_python: float

    def changed(self, row: float = 1.0, draft: float = 1.0) -> "Costs":
        """Return costs with rows, roots' own among them, and everything that a draft costs made cheaper."""
        return replace(
            self,
            roots=self.roots - BATCH * self.row * (1 - row),
            row=self.row * row,
            level=self.level * draft,
            chain=self.chain * draft,
            follow=self.follow * draft,
            drafted_python=self.plain_python + (self.drafted_python - self.plain_python) * draft,
        )


def main() -> None:
    """Write the chains down, replay them, and print what comes of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="questions, a JSONL file (also .xz)")
    parser.add_argument("--costs", type=float, nargs=7, default=[6.3, 0.52, 0.2, 0.015, 0.38, 0.18, 0.40])
    parser.add_argument("--bound", type=float, default=0.39, help="what a row takes by arithmetic alone, ms")
    args = parser.parse_args()
    costs = Costs(*args.costs)
    bound = args.bound / costs.row
    recorder = Recorder()
    texts = {"chat": recorder.record(CHAT), "GSM8K": recorder.record(args.gsm8k)}
    table = Table("times plain decoding at batch 8", *texts)
    for name, changed in (
        ("as measured", costs),
        ("rows 15% cheaper", costs.changed(row=0.85)),
        ("the draft at half its cost", costs.changed(draft=0.5)),
        ("both", costs.changed(row=0.85, draft=0.5)),
        ("rows at the bound of arithmetic, the draft at half its cost", costs.changed(row=bound, draft=0.5)),
        ("rows at that bound, the draft for nothing", costs.changed(row=bound, draft=0.0)),
    ):
        table.add_row(name, *(best(answers, changed) for answers in track(texts.values(), name, transient=True)))
    for noisy in (False, True):
        name = f"the controller, at measured costs{', with noise' if noisy else ''}"
        table.add_row(name, *(found_out(answers, costs, noisy) for answers in texts.values()))
    Console().print(table)


class Recorder:
    """Writes down the chains after every token of answers."""

    def __init__(self) -> None:
        draft = embedded_draft()
        assert draft is not None, "the embedded draft ships with the package"
        self._llm = LLM(
            embedded_model(),
            draft,
            tree=TreeShape.chain(DEPTH),
            max_context=1024,
            max_requests=AT_ONCE,
            num_pages=AT_ONCE * 70,
        )
        self._scores: dict[int, Sequence[float]] = {}
        drafter = self._llm.engine.drafter
        assert isinstance(drafter, Eagle3Drafter)
        take_in = drafter.end_rounds

        def listen(request_ids: Sequence[int], results: Sequence[RoundResult]) -> None:
            self._scores = dict(zip(request_ids, results[0].scores, strict=True))
            take_in(request_ids, results)

        drafter.end_rounds = listen

    def record(self, path: Path) -> list[list[Chain]]:
        """Return the chains of every answer that does not end before its time."""
        prompts = [self._llm.encode(chat) for chat in read_prompts(path)[:CANDIDATES]]
        answers = self._llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.0))
        whole = [pair for pair in zip(prompts, answers, strict=True) if len(pair[1].tokens) == TOKENS][:ANSWERS]
        return [
            [
                chain
                for first in range(0, TOKENS, AT_ONCE)
                for chain in self._chains(prompt, [token.token_id for token in answer.tokens], first)
            ]
            for prompt, answer in track(whole, f"chains of {path.name}", transient=True)
        ]

    def _chains(self, prompt: list[int], answer: list[int], first: int) -> list[Chain]:
        """Have a request start at each of some positions of an answer, and look at its first chain."""
        engine = self._llm.engine
        params = SamplingParams(max_tokens=DEPTH + 3, temperature=0.0, ignore_eos=True)
        ids = [engine.add([*prompt, *answer[:at]], params, 0) for at in range(first, first + AT_ONCE)]
        chains: dict[int, Chain] = {}
        while len(chains) < AT_ONCE:
            self._scores = {}
            for emission in engine.step():
                name = emission.request_id
                if name in self._scores and name not in chains:
                    chains[name] = Chain(self._scores[name], len(emission.tokens) - 1)
        for name in ids:
            engine.abort(name)
        return [chains[name] for name in ids]


class Replay:
    """Passes over 8 answers, each taken up where the one before it in some order ended."""

    def __init__(self, answers: Sequence[Sequence[Chain]], costs: Costs, seed: int, noisy: bool = False) -> None:
        self._costs = costs
        order = random.Random(seed)
        self._more = itertools.cycle(order.sample(answers, len(answers)))
        self._places = [(next(self._more), order.randrange(TOKENS // 2)) for _ in range(BATCH)]
        self._noise = _noise(random.Random(seed + 1)) if noisy else itertools.repeat((1.0, 0.0))
        self.tokens, self.ms = 0, 0.0

    def run(self, reach: Reach) -> DraftedPass:
        """Make a pass, its chains cut so; return it as the controller is told of it."""
        costs = self._costs
        chains = [answer[at] for answer, at in self._places]
        factor, spike_ms = next(self._noise)
        levels, alive, worth, draft_ms = 0, list(range(BATCH)), reach.cut.need, 0.0
        counts = [0] * BATCH
        while levels < reach.depth and alive and worth >= reach.cut.need:
            draft_ms += (costs.level + costs.chain * len(alive)) * factor
            alive = [row for row in alive if chains[row].scores[levels] >= reach.cut.floor]
            worth = sum(math.exp(chains[row].scores[levels]) - math.exp(reach.cut.floor) for row in alive)
            for row in alive:
                counts[row] += 1
            levels += 1
        kept = [min(chain.kept, count) for chain, count in zip(chains, counts, strict=True)]
        check_ms = (costs.roots + costs.row * sum(counts)) * factor + spike_ms
        follow_ms = costs.follow * factor if reach.follows else 0.0
        python_ms = costs.drafted_python if reach.depth else costs.plain_python
        self.tokens += BATCH + sum(kept)
        self.ms += (whole_ms := draft_ms + check_ms + follow_ms + python_ms)
        for row, (answer, at) in enumerate(self._places):
            after = at + 1 + kept[row]
            self._places[row] = (answer, after) if after < TOKENS else (next(self._more), 0)
        outcomes = zip(chains, counts, kept, strict=True)
        drafted = [DraftedChain(_seen(chain, count, levels, reach.depth), count, k) for chain, count, k in outcomes]
        return DraftedPass(drafted, levels, draft_ms / 1e3, check_ms / 1e3, whole_ms / 1e3, follow_ms / 1e3)


def _seen(chain: Chain, count: int, levels: int, depth: int) -> list[float]:
    """Return a chain's scores as far as it was drafted: up to the first token below the floor."""
    drafted = min(count + 1, levels)
    return [*chain.scores[:drafted], *([-math.inf] * (depth - drafted))] if depth else []


def _noise(luck: random.Random) -> Iterator[tuple[float, float]]:
    """Give what a machine that others use makes of a pass: a factor that changes at times, and milliseconds lost."""
    factor = 1.0
    while True:
        if luck.random() < 1 / 400:
            factor = luck.choice((1.0, 1.0, 1.08, 1.18))
        yield factor * (1 + 0.04 * abs(luck.gauss(0, 1))), luck.expovariate(1 / 3) if luck.random() < 0.05 else 0.0


def speed(answers: Sequence[Sequence[Chain]], costs: Costs, reach: Reach, seed: int) -> float:
    """Return tokens a millisecond of passes that are all cut alike."""
    replay = Replay(answers, costs, seed)
    for _ in range(PASSES):
        replay.run(reach)
    return replay.tokens / replay.ms


def best(answers: Sequence[Sequence[Chain]], costs: Costs) -> str:
    """Return what the best of many ways to cut chains comes to."""
    plain = [speed(answers, costs, PLAIN, seed) for seed in range(ORDERS)]
    ways = [Reach(depth, Cut(math.log(floor), need)) for depth, floor, need in itertools.product(DEPTHS, FLOORS, NEEDS)]
    gains = [statistics.fmean(speed(answers, costs, way, seed) / plain[seed] for seed in range(ORDERS)) for way in ways]
    return f"{max(1.0, *gains):.2f}"


def found_out(answers: Sequence[Sequence[Chain]], costs: Costs, noisy: bool) -> str:
    """Return what the controller makes of the same passes, not knowing their costs beforehand."""
    gains = []
    for seed in range(CONTROLLER_ORDERS):
        controller = ChainController()
        drafted, plain = (Replay(answers, costs, seed, noisy) for _ in range(2))
        for _ in range(CONTROLLER_PASSES):
            controller.record(drafted.run(controller.reach(BATCH, DEPTH)))
            plain.run(PLAIN)
        gains.append(drafted.tokens / drafted.ms * plain.ms / plain.tokens)
    return f"{statistics.fmean(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
