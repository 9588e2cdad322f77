"""Compares an arm with the baseline token for token: speculation may change the time, never the text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.bench.client import Client
from slipstream.bench.evals.answers import Asking, Token, ask_all
from slipstream.bench.workload import Prompt
from slipstream.records.evals import FirstDifference, LosslessCase


@dataclass(frozen=True)
class Settings:
    """What is compared: greedily once, and once for every seed at `temperature`."""

    seeds: tuple[int, ...] = (0, 1)
    temperature: float = 0.8
    concurrency: int = 4

    def samplings(self) -> list[tuple[float, int]]:
        """Return (temperature, seed) pairs, greedy first."""
        return [(0.0, 0), *((self.temperature, seed) for seed in self.seeds)]


async def compare(
    baseline: Client,
    arm: Client,
    prompts: Sequence[Prompt],
    settings: Settings,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[LosslessCase, ...]:
    """Ask both servers the same and return one case for each prompt and sampling."""
    cases = []
    for temperature, seed in settings.samplings():
        asking = Asking(temperature, seed, with_tokens=True, concurrency=settings.concurrency)
        expected = await ask_all(baseline, prompts, asking, on_done)
        found = await ask_all(arm, prompts, asking, on_done)
        for index, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            difference = first_difference(mine.tokens, theirs.tokens)
            cases.append(LosslessCase(index, temperature, seed, len(mine.tokens), difference))
    return tuple(cases)


def first_difference(baseline: Sequence[Token], arm: Sequence[Token]) -> FirstDifference | None:
    """Return where two token sequences part, with the baseline's top-two margin there; None when they are equal."""
    for position in range(max(len(baseline), len(arm))):
        mine = baseline[position] if position < len(baseline) else None
        theirs = arm[position] if position < len(arm) else None
        mine_text, theirs_text = (token.text if token else "(end)" for token in (mine, theirs))
        if mine is None or theirs is None or mine.text != theirs.text:
            margin = mine.top_two[0] - mine.top_two[1] if mine and mine.top_two else None
            return FirstDifference(position, mine_text, theirs_text, margin)
    return None
