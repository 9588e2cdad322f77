"""Progress of long phases: bars on a terminal, and a line every ten seconds where output is a file or a pipe."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

PERIOD_S = 10.0
_SURE_AFTER_S = 2.0  # before that a rate says little, so no time left is shown


@dataclass
class Phase:
    """One stretch of work, counted in its own unit.

    Args:
        total: how much there is; None where that is not known.
        unit: what is counted, in the plural; empty for a phase that is only a share of its whole.
        per: so many of what is counted make one of the unit, such as 1e6 for bytes shown as MB.
        note: a few words on where it stands, changed at will.
    """

    name: str
    total: float | None
    unit: str = ""
    per: float = 1.0
    note: str = ""
    done: float = 0.0
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    ended: float | None = None

    def __post_init__(self) -> None:
        self.started = self.clock()

    def advance(self, amount: float = 1.0) -> None:
        """Count more as done."""
        self.done += amount

    def end(self) -> None:
        """Take note that the phase is over."""
        self.ended = self.ended or self.clock()

    @property
    def share(self) -> float | None:
        """The part that is done, from 0 to 1; None where the total is not known."""
        return None if not self.total else min(1.0, self.done / self.total)

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return (self.clock() if self.ended is None else self.ended) - self.started

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the pace so far; None while that cannot be told."""
        if self.total is None or self.done <= 0 or self.seconds < _SURE_AFTER_S:
            return None
        return max(0.0, (self.total - self.done) * self.seconds / self.done)

    def describe(self) -> str:
        """Say how much is done, how fast, and how long the rest takes."""
        words = [self.note] if self.note else []
        if self.unit:
            of = "" if self.total is None else f" of {self.total / self.per:,.0f}"
            words.append(f"{self.done / self.per:,.0f}{of} {self.unit}")
            if self.seconds >= _SURE_AFTER_S and self.done:
                words.append(f"{_rounded(self.done / self.per / self.seconds)}/s")
        words.append(clock_time(self.seconds))
        if self.ended is None and self.seconds_left is not None:
            words.append(f"{clock_time(self.seconds_left)} left")
        return ", ".join(words)


class Phases:
    """Shows phases while a `with` block lasts; everything printed to its console meanwhile stays above the bars."""

    def __init__(self, console: Console, period_s: float = PERIOD_S) -> None:
        self.console = console
        self._period_s = period_s
        self._phases: list[Phase] = []
        self._told: set[str] = set()
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell_now_and_then, name="progress", daemon=True)
        self._bars = Progress(
            _Name(), BarColumn(20), _Description(), console=console, transient=True, redirect_stdout=not console.stderr
        )

    def start(self, name: str, total: float | None = None, unit: str = "", per: float = 1.0) -> Phase:
        """Begin a phase; the one before is over, unless it has been ended already."""
        if self._phases:
            self._finish(self._phases[-1])
        phase = Phase(name, total, unit, per)
        self._phases.append(phase)
        self._bars.add_task(name, total=None, phase=phase)
        return phase

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bars.start()
        else:
            self._teller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._phases and error is None:
            self._finish(self._phases[-1])
        self._over.set()
        if self.console.is_terminal:
            self._bars.stop()
        else:
            self._teller.join()

    def _finish(self, phase: Phase) -> None:
        phase.end()
        if phase.name in self._told and not self.console.is_terminal:
            self._tell(phase)

    def _tell_now_and_then(self) -> None:
        while not self._over.wait(self._period_s):
            for phase in [phase for phase in self._phases if phase.ended is None]:
                self._told.add(phase.name)
                self._tell(phase)

    def _tell(self, phase: Phase) -> None:
        share = "" if phase.share is None else f"{phase.share:.0%}, "
        line = f"{phase.name}: {'done, ' if phase.ended is not None else share}{phase.describe()}"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def clock_time(seconds: float) -> str:
    """Return a length of time as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Name(ProgressColumn):
    """Shows a phase's name; being the first column, it also moves the bar behind it to where the phase is."""

    def render(self, task: Task) -> Text:
        phase: Phase = task.fields["phase"]
        task.total, task.completed = phase.total, phase.done
        if phase.ended is not None:
            task.total = task.completed = 1.0
        return Text(phase.name)


class _Description(ProgressColumn):
    def render(self, task: Task) -> Text:
        phase: Phase = task.fields["phase"]
        return Text(phase.describe() if phase.share is None else f"{phase.share:4.0%} {phase.describe()}")


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
