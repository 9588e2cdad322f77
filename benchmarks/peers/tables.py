"""What the turns of `benchmarks/cpu.py` come to: medians over rounds, ratios paired within a round, aims met or not."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from peers.arms import PLAIN, SAME_FILE


@dataclass(frozen=True)
class Point:
    """What is measured: a set of prompts, so many at once."""

    prompts: str
    batch: int

    def __str__(self) -> str:
        return f"{self.prompts}, batch {self.batch}"


@dataclass(frozen=True)
class Turn:
    """One arm's turn in one round.

    Args:
        tokens_a_pass: of one answer.
        agreement: share of the tokens up to the first that differs from our plain decoding's.
        whole_seconds: prompts and stragglers included.
    """

    round: int
    point: Point
    arm: str
    program: str
    speed: float
    tokens_a_pass: float
    agreement: float
    whole_seconds: float


@dataclass(frozen=True)
class Ratio:
    """How many times one arm's speed is another's: the median over rounds, and the range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}..{self.high:.2f}]"


@dataclass(frozen=True)
class Aim:
    """A ratio that is claimed, beside what it should be at least."""

    claim: str
    ratio: Ratio
    wanted: float


class Results:
    """All turns of a run."""

    def __init__(self, turns: Iterable[Turn], floors: dict[str, float]) -> None:
        self._turns = list(turns)
        self._floors = floors
        self.points = list(dict.fromkeys(turn.point for turn in self._turns))

    def arms(self, point: Point, program: str | None = None) -> list[str]:
        """Return the arms measured at a point, in their order."""
        found = (turn for turn in self._turns if turn.point == point and program in (None, turn.program))
        return list(dict.fromkeys(turn.arm for turn in found))

    def speed(self, arm: str, point: Point) -> float:
        """Return an arm's median tokens a second."""
        return statistics.median(turn.speed for turn in self._of(arm, point))

    def best(self, arms: Sequence[str], point: Point) -> str | None:
        """Return the fastest of some arms."""
        return max(arms, key=lambda arm: self.speed(arm, point), default=None)

    def ratio(self, arm: str | None, other: str | None, point: Point) -> Ratio | None:
        """Compare two arms round by round; None when one was not measured."""
        mine, theirs = (
            {turn.round: turn.speed for turn in self._turns if (turn.arm, turn.point) == (name, point)}
            for name in (arm, other)
        )
        both = [mine[number] / theirs[number] for number in mine.keys() & theirs.keys()]
        return Ratio(statistics.median(both), min(both), max(both)) if both else None

    def table(self, point: Point) -> Table:
        """Show a point: one row an arm."""
        llama, vllm = (self.best(self.arms(point, program), point) for program in ("llama", "vllm"))
        named = {f"/ {best}": best for best in (llama, vllm, PLAIN) if best is not None}
        table = Table(title=f"{point}: tokens a second", title_justify="left")
        for name in ("", "tok/s", "range", *named, "of floor", "a pass", "text"):
            table.add_column(name, justify="left" if not name else "right", overflow="fold")
        for arm in self.arms(point):
            turns = self._of(arm, point)
            low, high = min(turn.speed for turn in turns), max(turn.speed for turn in turns)
            ratios = [self.ratio(arm, other, point) for other in named.values()]
            floor = self._floors.get(arm)
            table.add_row(
                arm,
                f"{self.speed(arm, point):.1f}",
                f"{low:.0f}..{high:.0f}",
                *("-" if ratio is None else f"{ratio.median:.2f}x" for ratio in ratios),
                "-" if floor is None else f"{self.speed(arm, point) / point.batch / floor:.0%}",
                f"{statistics.mean(turn.tokens_a_pass for turn in turns):.2f}",
                f"{statistics.mean(turn.agreement for turn in turns):.0%}",
            )
        return table

    def aims(self) -> list[Aim]:
        """Return the claims that this run can check."""
        one, questions, eight = Point("chat", 1), Point("gsm8k", 1), Point("chat", 8)
        found = []
        for point, wanted in ((one, 1.0), (eight, 1.2)):
            found.append((f"plain to llama.cpp on the same file, {point}", (PLAIN, SAME_FILE), point, wanted))
        for point, wanted in ((one, 1.5), (questions, 1.8)):
            llama = self.best(self.arms(point, "llama"), point)
            found.append((f"EAGLE-3 to {llama}, {point}", (self._eagle3(point), llama), point, wanted))
        vllm = self.best(self.arms(one, "vllm"), one)
        found.append((f"EAGLE-3 to {vllm}, {one}", (self._eagle3(one), vllm), one, 3.0))
        found.append((f"EAGLE-3 to our plain decoding, {eight}", (self._eagle3(eight), PLAIN), eight, 1.2))
        ratios = ((claim, self.ratio(*pair, point), wanted) for claim, pair, point, wanted in found)
        return [Aim(claim, ratio, wanted) for claim, ratio, wanted in ratios if ratio is not None]

    def _eagle3(self, point: Point) -> str | None:
        return self.best([arm for arm in self.arms(point, "slipstream") if arm != PLAIN], point)

    def _of(self, arm: str, point: Point) -> list[Turn]:
        return [turn for turn in self._turns if (turn.arm, turn.point) == (arm, point)]


def aims_table(aims: Sequence[Aim]) -> Table:
    """Show what is claimed beside what was measured."""
    table = Table(title="aims", title_justify="left")
    for name in ("ratio", "measured", "wanted", ""):
        table.add_column(name, justify="right" if name in ("measured", "wanted") else "left")
    for aim in aims:
        met = "[green]met[/green]" if aim.ratio.median >= aim.wanted else "[red]missed[/red]"
        table.add_row(aim.claim, str(aim.ratio), f"{aim.wanted:.1f}x", met)
    return table
