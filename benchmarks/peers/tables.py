"""What the turns of `benchmarks/cpu.py` come to: medians over rounds, ratios paired within a round."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from peers.arms import PLAIN


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

    def _of(self, arm: str, point: Point) -> list[Turn]:
        return [turn for turn in self._turns if (turn.arm, turn.point) == (arm, point)]
