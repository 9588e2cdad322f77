"""What `slipstream train` shows while it works: a bar for every phase, or a line every ten seconds for a log."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.cli.progress import clock_time
from slipstream.cli.tables import narrow_table

if TYPE_CHECKING:
    from slipstream.train.data.conversations import Tally
    from slipstream.train.data.generate import GenerationStats
    from slipstream.train.draft.capture import DiskCost
    from slipstream.train.run.recipe import Recipe
    from slipstream.train.run.trainer import Progress as Step

_EVERY_S = 10.0
_SETTLED_S = 3.0  # before that, a speed says nothing about the time left


def bars(console: Console) -> Progress:
    """Return the bars; where the console is no terminal they are not drawn."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"),
        TextColumn("{task.fields[speed]}{task.fields[left]}"), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip


class Display:
    """Shows the long phases: a bar each, and a line for every report of the training."""

    def __init__(self, shown: Progress) -> None:
        self._bars = shown
        self._tasks: dict[str, TaskID] = {}
        self._said_at = time.monotonic()
        self._answer_tokens = 0
        self._data_from: tuple[int, float] | None = None
        self._features_from: tuple[int, float] | None = None
        self._features_total = 0

    def print(self, line: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(line, highlight=False, soft_wrap=True)

    def expect(self, recipe: "Recipe") -> None:
        """Take in how much data is to come."""
        self._answer_tokens = recipe.data.answer_tokens

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show a phase whose length is not known."""
        task = self._bars.add_task(what, total=None, speed="", left="")
        if not self._bars.console.is_terminal:
            self.print(what)
        try:
            yield
        finally:
            self._bars.update(task, total=1, completed=1)
            self._said_at = time.monotonic()

    def data(self, tally: "Tally", stats: "GenerationStats") -> None:
        """Show how far the data is; what an earlier call wrote says nothing about how fast this one is."""
        if self._data_from is None:
            self._data_from = (tally.answer_tokens, stats.seconds)
        done, since = tally.answer_tokens - self._data_from[0], stats.seconds - self._data_from[1]
        left = (self._answer_tokens - tally.answer_tokens) * since / done if done > 0 and since > _SETTLED_S else None
        what = f"data: {tally.kept:,} texts, {tally.answer_tokens:,} of {self._answer_tokens:,} tokens"
        self._show("data", what, (tally.answer_tokens, self._answer_tokens), stats.tokens_per_s, left)

    def cost(self, cost: "DiskCost") -> None:
        """Show what storing the target's states takes, before anything is written."""
        self.print(f"offline: {cost}")
        self._features_total = cost.manifest.num_tokens

    def features(self, tokens: int) -> None:
        """Show how far storing is."""
        now = time.monotonic()
        if self._features_from is None:
            self._features_from = (tokens, now)
        done, since = tokens - self._features_from[0], now - self._features_from[1]
        speed = done / since if since > 0 else 0.0
        left = (self._features_total - tokens) / speed if speed > 0 else None
        what = f"features: {tokens:,} of {self._features_total:,} tokens"
        self._show("features", what, (tokens, self._features_total), speed, left)

    def step(self, step: "Step") -> None:
        """Show how far the training is, and what it has reached."""
        what = f"training: step {step.step:,} of {step.total_steps:,}, loss {step.loss:.3f}"
        accuracy = " ".join(f"{value:.1%}" for value in step.accuracy)
        reached = "".join(f"  {name} {value:.2f}" for name, value in step.acceptance.items())
        if self._bars.console.is_terminal or reached or step.step == step.total_steps or self._is_due():
            left = "" if self._bars.console.is_terminal else f"  {_left(step.seconds_left)}"
            line = f"step {step.step}/{step.total_steps}  loss {step.loss:.4f}  accuracy {accuracy}  lr {step.lr:.1e}"
            self.print(line + reached + left)
            self._said_at = time.monotonic()
        self._show("training", what, (step.step, step.total_steps), step.tokens_per_s, step.seconds_left)

    def _is_due(self) -> bool:
        return time.monotonic() - self._said_at >= _EVERY_S

    def _show(self, name: str, what: str, done: tuple[int, int], speed: float, left: float | None) -> None:
        """Move a bar, or print a line if the last was long ago."""
        pace = "" if speed == 0 else f"{speed:,.0f} tokens/s"  # nothing is done yet, or all of it was
        rest = "" if left is None else f", {_left(left)}"
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=done[1], speed="", left="")
        self._bars.update(
            self._tasks[name], completed=min(done), total=done[1], speed=pace, left=rest, description=what
        )
        if not self._bars.console.is_terminal and self._is_due():
            self.print(f"{what}{pace and ', '}{pace}{rest}")
            self._said_at = time.monotonic()


def results_table(title: str, results: Mapping[str, Any], before: Mapping[str, Any]) -> Table:  # a record's JSON
    """Return what was measured on each set of prompts, and what the draft that training started from has on them."""
    numbers = ("texts", "loop-\ning", "chain", "tokens\na pass", "before", "no\nloops")
    table = narrow_table(title, ("prompts", *numbers, "kept by position"), folding=("prompts", "kept by position"))
    for name, result in results.items():
        for chain, entry in result["chains"].items():
            table.add_row(
                name,
                str(result["texts"]),
                f"{result['loop_share']:.1%}",
                chain,
                f"{entry['acceptance_length']:.2f}",
                f"{before[name]['chains'][chain]['acceptance_length']:.2f}" if name in before else "-",
                f"{entry['acceptance_length_without_loops']:.2f}",
                " ".join(f"{rate:.0%}" for rate in entry["rates"]),
            )
    return table


def _left(seconds: float) -> str:
    return f"{clock_time(max(0.0, seconds))} left"
