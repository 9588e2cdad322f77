"""One figure for each comparison: how much faster an arm is than its baseline, over all loads they share."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.records.compare import Speedup, speedup
from slipstream.report.series import Cell, Grid, Setting, output_per_device


@dataclass(frozen=True)
class Headline:
    """A figure to read first, and the words that go with it."""

    figure: str
    words: str


def headline_figures(grid: Grid) -> Iterator[Headline]:
    """Yield the speed-up of each arm over its baseline, for each recipe and topology."""
    places = dict.fromkeys((setting.recipe, setting.topology) for setting in grid.settings)
    for recipe, topology in places:
        settings = [s for s in grid.settings if (s.recipe, s.topology) == (recipe, topology)]
        for arm in dict.fromkeys(arm for setting in settings for arm in grid.arms(setting)):
            found = _compared(grid, settings, arm)
            if found:
                yield _headline(grid, found)


def _compared(grid: Grid, settings: list[Setting], arm: str) -> list[tuple[Cell, Cell]]:
    """Return an arm's cells with their baselines' at the same loads; none for a baseline."""
    pairs = []
    for setting in settings:
        base = grid.baseline(setting, arm) if arm in grid.arms(setting) else arm
        for concurrency in grid.concurrencies(setting) if base != arm else ():
            cell, baseline = grid.cell(setting, arm, concurrency), grid.cell(setting, base, concurrency)
            if (
                cell
                and baseline
                and cell.by_seed(output_per_device).keys() & baseline.by_seed(output_per_device).keys()
            ):
                pairs.append((cell, baseline))
    return pairs


def _headline(grid: Grid, pairs: list[tuple[Cell, Cell]]) -> Headline:
    overall = _overall(pairs)
    cell, baseline = pairs[0]
    place = f", {cell.setting.recipe}" if cell.setting.one_of_several else ""
    loads = "1 load" if len(pairs) == 1 else f"geometric mean of {len(pairs)} loads"
    if overall is None:
        return Headline("?", f"{cell.arm} over {baseline.arm}{place}: no seed was measured at every load.")
    sure = f"95% interval {overall.low:.2f} to {overall.high:.2f}" if overall.num_pairs > 1 else "one seed, no interval"
    words = f"{cell.arm} over {baseline.arm}{place} on {cell.setting.topology}: output tokens/s, {loads}; {sure}."
    return Headline(f"{overall.ratio:.2f}x", words)


def _overall(pairs: list[tuple[Cell, Cell]]) -> Speedup | None:
    """Return the speed-up over all loads, paired by the seeds that every load has."""
    arms = [cell.by_seed(output_per_device) for cell, _ in pairs]
    bases = [baseline.by_seed(output_per_device) for _, baseline in pairs]
    seeds = set.intersection(*(set(values) for values in (*arms, *bases)))
    return speedup(_geometric_means(arms, seeds), _geometric_means(bases, seeds))


def _geometric_means(cells: list[dict[int, float]], seeds: set[int]) -> dict[int, float]:
    return {seed: math.exp(sum(math.log(values[seed]) for values in cells) / len(cells)) for seed in seeds}
