"""Line charts of a report: speed-up, acceptance, and throughput against interactivity."""

import math
from collections.abc import Callable
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from slipstream.records.point import PointRecord
from slipstream.report.series import (
    Cell,
    Grid,
    Setting,
    input_tokens,
    interactivity,
    output_per_device,
    output_tokens,
)
from slipstream.report.style import Look, Plot, hide_unused, legend_below, looks_of, new_figure, to_svg

_SIDES = ((-11, -9), (5, 4), (5, -9), (-11, 4))
"""Where labels of the first arm and the next ones stand, in points from their marker."""
_APART = 1.035
"""Arms are drawn so far beside each other, as a factor, that each interval can be seen."""
_WIDE = 12.0
"""Speed-ups and intervals that differ by more than this need a logarithmic axis."""


def speedup_by_concurrency(grid: Grid) -> Plot | None:
    """Draw each arm's speed-up against concurrency, one panel for each setting."""
    settings = [s for s in grid.settings if len(grid.arms(s)) > 1 and grid.concurrencies(s)]
    if not settings:
        return None
    looks = looks_of(grid.all_arms())
    figure, axes = _panels(len(settings), 2.6)
    for axis, setting in zip(axes.flat, settings, strict=False):
        shown: list[float] = []
        for arm in grid.arms(setting):
            cells = [grid.cell(setting, arm, c) for c in grid.concurrencies(setting)]
            shown += _speedup_line(axis, grid, [cell for cell in cells if cell], looks[arm], lambda c: c.concurrency)
        _set_apart(axis)
        _concurrency_axis(axis, grid.concurrencies(setting))
        _speedup_axis(axis, shown)
        axis.set_title(setting.title(), fontsize=9, loc="left")
    hide_unused(axes, len(settings))
    legend_below(figure, axes)
    return Plot(
        "Speed-up of output throughput over the baseline, with 95% intervals.",
        to_svg(figure),
        "Line charts of speed-up against concurrency",
        figure,
    )


def speedup_by_context(grid: Grid) -> Plot | None:
    """Draw speed-up against prompt length, at the lowest and highest concurrency that several workloads share.

    Workloads are compared whose answers are about as long, since a longer answer alone changes the speed-up.
    """
    rows = [settings for settings in _by_answer_length(grid) if _differ(grid, settings)]
    if not rows:
        return None
    looks = looks_of(grid.all_arms())
    figure, axes = new_figure(2.8 * len(rows), len(rows), 2)
    for row, settings in enumerate(rows):
        shared = sorted(set.intersection(*(set(grid.concurrencies(s)) for s in settings)))
        for axis, concurrency in zip(axes[row], [shared[0], shared[-1]] if shared else [], strict=False):
            shown: list[float] = []
            for arm in grid.all_arms():
                cells = [grid.cell(s, arm, concurrency) for s in settings]
                found = sorted((c for c in cells if c), key=lambda c: c.mean(input_tokens) or 0)
                if found:
                    shown += _speedup_line(axis, grid, found, looks[arm], lambda c: c.mean(input_tokens) or 0)
            _set_apart(axis)
            _speedup_axis(axis, shown)
            context_axis(axis)
            lengths = [round(_mean_of(grid, setting, input_tokens)) for setting in settings]
            axis.set_xticks(lengths, [str(length) for length in lengths])
            axis.minorticks_off()
            names = ", ".join(setting.workload for setting in settings)
            axis.set_title(f"{settings[0].topology}, concurrency {concurrency}: {names}", fontsize=9, loc="left")
    legend_below(figure, axes)
    alt = "Line charts of speed-up against prompt length"
    return Plot("Speed-up against prompt length.", to_svg(figure), alt, figure)


def _by_answer_length(grid: Grid) -> list[list[Setting]]:
    """Return settings of one recipe and topology in groups: in each, an answer is at most 1.25 times the next."""
    groups: list[list[Setting]] = []
    lengths = {setting: _mean_of(grid, setting, output_tokens) for setting in grid.settings}
    for setting in sorted(grid.settings, key=lambda s: (s.recipe, s.topology, lengths[s])):
        last = groups[-1][-1] if groups else None
        alike = last is not None and (last.recipe, last.topology) == (setting.recipe, setting.topology)
        if last is not None and alike and lengths[setting] <= 1.25 * lengths[last]:
            groups[-1].append(setting)
        else:
            groups.append([setting])
    return groups


def _differ(grid: Grid, settings: list[Setting]) -> bool:
    """Say whether prompts of one setting are twice as long as another's."""
    lengths = [_mean_of(grid, setting, input_tokens) for setting in settings]
    return max(lengths) >= 2 * min(lengths)


def _mean_of(grid: Grid, setting: Setting, value: Callable[[PointRecord], float | None]) -> float:
    found = [cell.mean(value) or 1.0 for cell in grid.cells() if cell.setting == setting]
    return sum(found) / len(found) if found else 1.0


def acceptance_by_position(grid: Grid) -> Plot | None:
    """Draw how often the draft's first, second, ... token is accepted."""
    rates: dict[Setting, dict[str, tuple[float, ...]]] = {}
    for setting in grid.settings:
        for arm in grid.arms(setting):
            cells = [cell for c in grid.concurrencies(setting) if (cell := grid.cell(setting, arm, c))]
            mean = _mean_rates(cells)
            if mean:
                rates.setdefault(setting, {})[arm] = mean
    if not rates:
        return None
    looks = looks_of(grid.all_arms())
    figure, axes = _panels(len(rates), 2.4)
    for axis, (setting, by_arm) in zip(axes.flat, rates.items(), strict=False):
        for arm, values in by_arm.items():
            look = looks[arm]
            axis.plot(range(1, len(values) + 1), values, color=look.color, marker=look.marker, ls=look.dash, label=arm)
        axis.set_ylim(0, 1)
        axis.set_xticks(range(1, max(len(v) for v in by_arm.values()) + 1))
        axis.set_xlabel("position in the draft", fontsize=8)
        axis.set_ylabel("accepted", fontsize=8)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axis.set_title(setting.title(), fontsize=9, loc="left")
    hide_unused(axes, len(rates))
    legend_below(figure, axes)
    alt = "Line charts of acceptance by position"
    return Plot("Share of drafts accepted, by position.", to_svg(figure), alt, figure)


def pareto(grid: Grid) -> Plot | None:
    """Draw throughput per device against what one user sees; up and to the right is better."""
    settings = [s for s in grid.settings if grid.concurrencies(s)]
    if not settings:
        return None
    looks = looks_of(grid.all_arms())
    figure, axes = _panels(len(settings), 3.0)
    for axis, setting in zip(axes.flat, settings, strict=False):
        for index, arm in enumerate(grid.arms(setting)):
            look = looks[arm]
            cells = [cell for c in grid.concurrencies(setting) if (cell := grid.cell(setting, arm, c))]
            points = [(cell.mean(interactivity), cell.mean(output_per_device), cell.concurrency) for cell in cells]
            known = [(x, y, c) for x, y, c in points if x is not None and y is not None]
            xs, ys = [x for x, _, _ in known], [y for _, y, _ in known]
            axis.plot(xs, ys, color=look.color, marker=look.marker, ls=look.dash, label=arm, markersize=5)
            for x, y, c in known:
                # Each arm's labels have a side of their own and its colour, so that close curves stay legible.
                place = _SIDES[index % len(_SIDES)]
                axis.annotate(f"c{c}", (x, y), xytext=place, textcoords="offset points", fontsize=6, color=look.color)
        axis.margins(0.12)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tok/s for one user (1000 / TPOT)", fontsize=8)
        axis.set_ylabel("output tok/s/device", fontsize=8)
        axis.set_title(setting.title(), fontsize=9, loc="left")
    hide_unused(axes, len(settings))
    legend_below(figure, axes)
    return Plot(
        "Throughput per device against interactivity; labels are concurrencies.",
        to_svg(figure),
        "Pareto curves by arm",
        figure,
    )


def _speedup_line(axis: Any, grid: Grid, cells: list[Cell], look: Look, x_of: Callable[[Cell], float]) -> list[float]:
    """Draw one arm's line with its intervals and return every value the panel must show."""
    found = [(x_of(cell), ratio) for cell in cells if (ratio := grid.speedup(cell, output_per_device))]
    if not found:
        return []  # a baseline
    xs = [x for x, _ in found]
    ys = [ratio.ratio for _, ratio in found]
    # One seed has no interval: its whisker would run from nought to infinity.
    below = [max(0.0, ratio.ratio - ratio.low) if ratio.num_pairs > 1 else 0.0 for _, ratio in found]
    above = [max(0.0, ratio.high - ratio.ratio) if ratio.num_pairs > 1 else 0.0 for _, ratio in found]
    axis.errorbar(
        xs,
        ys,
        yerr=[below, above],
        color=look.color,
        marker=look.marker,
        ls=look.dash,
        label=cells[0].arm,
        capsize=2,
        markersize=5,
        elinewidth=1.0,
    )
    return [y - low for y, low in zip(ys, below, strict=True)] + [y + high for y, high in zip(ys, above, strict=True)]


def _set_apart(axis: Any) -> None:
    """Move the arms of a logarithmic panel sideways, so that no interval hides another."""
    drawn = axis.containers
    for index, container in enumerate(drawn):
        factor = _APART ** (index - (len(drawn) - 1) / 2)
        line, caps, (bars,) = container.lines
        for moved in (line, *caps):
            moved.set_xdata([x * factor for x in moved.get_xdata()])
        bars.set_segments([[(x * factor, y) for x, y in segment] for segment in bars.get_segments()])


def _panels(count: int, height_in: float) -> tuple[Any, Any]:
    """Return a figure with so many panels or a few more, three side by side where that leaves none empty."""
    columns = 3 if count % 3 == 0 else min(2, count)
    rows = math.ceil(count / columns)
    return new_figure(height_in * rows + 0.5, rows, columns)


def _speedup_axis(axis: Any, values: list[float]) -> None:
    """Show 1 and every interval whole: a whisker that leaves its panel hides how little is known.

    Two seeds can leave an interval so wide that the lines would lie flat below it; then the axis is logarithmic.
    """
    axis.axhline(1.0, color="black", linewidth=0.8)
    if values:
        low, high = min(1.0, *values), max(1.0, *values)
        if low > 0 and high / low > _WIDE:
            axis.set_yscale("log")
            axis.set_ylim(low / 1.3, high * 1.3)
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            margin = 0.06 * (high - low) or 0.1
            axis.set_ylim(low - margin, high + margin)
    axis.set_ylabel("speed-up", fontsize=8)


def _concurrency_axis(axis: Any, concurrencies: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(concurrencies, [str(c) for c in concurrencies])
    axis.minorticks_off()
    axis.set_xlabel("concurrency", fontsize=8)


def context_axis(axis: Any, label: str = "input tokens") -> None:
    """Lay out an axis of lengths."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel(label, fontsize=8)


def _mean_rates(cells: list[Cell]) -> tuple[float, ...]:
    accepted: list[float] = []
    drafted: list[float] = []
    for cell in cells:
        for record in cell.records:
            if record.acceptance is None:
                continue
            pairs = zip(record.acceptance.accepted_by_position, record.acceptance.drafted_by_position, strict=True)
            for position, (a, d) in enumerate(pairs):
                if position == len(accepted):
                    accepted.append(0.0)
                    drafted.append(0.0)
                accepted[position] += a
                drafted[position] += d
    return tuple(a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True))
