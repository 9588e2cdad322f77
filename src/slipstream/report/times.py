"""Where the time goes: shares of step time, and what decoding costs at each context length."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter

from slipstream.records.point import ContextCost, Phases, PointRecord
from slipstream.report.lines import context_axis
from slipstream.report.series import Cell, Grid, acceptance_length, input_tokens
from slipstream.report.style import Look, Plot, legend_below, looks_of, new_figure, to_svg
from slipstream.report.tables import Table, number

PARTS: tuple[tuple[str, Callable[[Phases], float], str, str], ...] = (
    ("prefill", lambda phases: phases.prefill_s, "#2a9d77", "\\\\\\"),
    ("draft", lambda phases: phases.draft_s, "#0b6fa4", "///"),
    ("verify", lambda phases: phases.verify_s, "#bbbbbb", ""),
    ("mixed", lambda phases: phases.mixed_s, "#b58bd0", "++"),
    ("host", lambda phases: phases.host_s, "#d9a514", "..."),
)
_NOT_TOLD = "not told"
_FEWEST = 8  # passes at one context: fewer are no average


def _verify_ms_per_pass(cost: ContextCost) -> float | None:
    return 1e3 * cost.verify_s / cost.passes


def _verify_ms_per_accepted(cost: ContextCost) -> float | None:
    """Of drafts: every row of a pass emits one token beside those it accepts."""
    accepted = cost.tokens - cost.rows
    return 1e3 * cost.verify_s / accepted if accepted >= _FEWEST else None


def _ms_per_token(cost: ContextCost) -> float | None:
    return 1e3 * (cost.draft_s + cost.verify_s) / cost.tokens if cost.tokens else None


_PANELS: tuple[tuple[str, Callable[[ContextCost], float | None]], ...] = (
    ("verify ms a pass", _verify_ms_per_pass),
    ("verify ms per accepted token", _verify_ms_per_accepted),
    ("draft + verify ms a token", _ms_per_token),
)


def shares(grid: Grid) -> Plot | None:
    """Draw what step time goes to, at the lowest and highest concurrency of each arm."""
    names: list[str] = []
    spent: list[dict[str, float]] = []
    for cell in grid.cells():
        concurrencies = grid.concurrencies(cell.setting)
        if cell.concurrency in (concurrencies[0], concurrencies[-1]) and (found := _shares(cell)):
            names.append(f"{cell.arm}, {cell.setting.workload}, c{cell.concurrency}")
            spent.append(found)
    if not spent:
        return None
    figure, axes = new_figure(0.7 + 0.22 * len(spent))
    axis = axes[0][0]
    left = [0.0] * len(spent)
    for label, _, color, hatch in PARTS:
        widths = [found[label] for found in spent]
        if any(widths):
            axis.barh(range(len(spent)), widths, left=left, color=color, hatch=hatch, edgecolor="white", label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(0, 1)
    axis.grid(visible=False)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    legend_below(figure, axes)
    caption = "Where step time goes, as the engine measured it."
    return Plot(caption, to_svg(figure), "Stacked bars of shares of step time", figure)


def cost_by_context(grid: Grid) -> Plot | None:
    """Draw what decoding costs against the context it is at, for the lowest and the highest concurrency."""
    loads = sorted({cell.concurrency for cell in grid.cells()})
    rows = {load: _costs(grid, load) for load in dict.fromkeys((*loads[:1], *loads[-1:]))}
    rows = {load: by_arm for load, by_arm in rows.items() if _reaches_far(by_arm.values())}
    if not rows:
        return None
    looks = looks_of(grid.all_arms())
    figure, axes = new_figure(2.5 * len(rows) + 0.4, len(rows), len(_PANELS))
    for panels, (load, by_arm) in zip(axes, rows.items(), strict=True):
        for axis, (title, value) in zip(panels, _PANELS, strict=True):
            _draw(axis, by_arm, value, looks)
            axis.set_title(f"{title}, c{load}", fontsize=8, loc="left")
    legend_below(figure, axes)
    caption = (
        "What decoding costs against the tokens a request has behind it, prompt and answer alike, from passes of the "
        "target that no prompt shared."
    )
    return Plot(caption, to_svg(figure), "Line charts of the cost of verification against context length", figure)


def time_table(grid: Grid) -> Table | None:
    """Return where step time goes and what verification costs; servers that do not tell are named so."""
    cells = list(grid.cells())
    if not any(_shares(cell) for cell in cells):
        return None
    parts = [part for part, *_ in PARTS if part != "mixed" or any(_shares(cell).get(part) for cell in cells)]
    rows = [(f"{cell.setting.title()} c{cell.concurrency}", cell.arm, *_figures_of(cell, parts)) for cell in cells]
    header = ("setting", "arm", "in", *parts, "busy", "v/(d+v)", "ms")
    note = (
        "In: input tokens; then shares of the engine's busy time, which is their sum over the point's duration. Mixed: "
        "passes that prompts and drafted tokens share. v/(d+v): verify of draft + verify. Ms: verification, for each "
        "accepted token, or each token without a draft. vLLM and SGLang do not count time by phase. When verify's "
        "share grows with context, long prompts eat the speed-up."
    )
    return Table("Where the time goes", header, tuple(rows), note)


def _figures_of(cell: Cell, parts: Sequence[str]) -> tuple[str, ...]:
    context = number(cell.mean(input_tokens), ".0f")
    found = _shares(cell)
    if not found:
        return (context, *(_NOT_TOLD for _ in parts), _NOT_TOLD, _NOT_TOLD, _NOT_TOLD)
    told = [found[part] for part in parts]
    figures = (cell.mean(_busy), cell.mean(_verify_share))
    return (
        context,
        *(f"{share:.0%}" for share in told),
        *("–" if share is None else f"{share:.0%}" for share in figures),
        number(cell.mean(_verify_ms_per_token), ".2f"),
    )


def _shares(cell: Cell) -> dict[str, float]:
    """Return the shares of step time over a cell's records; none if the server does not tell."""
    spent = [record.phases for record in cell.records if record.phases]
    total = sum(phases.total_s for phases in spent)
    return {label: sum(map(part, spent)) / total for label, part, *_ in PARTS} if total else {}


def _busy(record: PointRecord) -> float | None:
    """Share of the point's duration that the engine was at work."""
    if record.phases is None or record.throughput is None or not record.throughput.duration_s:
        return None
    return record.phases.total_s / record.throughput.duration_s


def _verify_share(record: PointRecord) -> float | None:
    """Share of draft and verify time that verification takes."""
    if record.phases is None or not record.phases.draft_s or not record.phases.verify_s:
        return None
    return record.phases.verify_s / (record.phases.draft_s + record.phases.verify_s)


def _verify_ms_per_token(record: PointRecord) -> float | None:
    """Milliseconds of passes that only decode, for each accepted token of theirs; for each token without a draft."""
    if record.phases is None:
        return None
    costs = record.phases.by_context
    drafts = acceptance_length(record) is not None
    tokens = sum(cost.tokens - (cost.rows if drafts else 0) for cost in costs)
    return 1e3 * sum(cost.verify_s for cost in costs) / tokens if tokens else None


def _costs(grid: Grid, concurrency: int) -> dict[str, list[ContextCost]]:
    """Return what passes took at one concurrency, by arm, the shortest context first."""
    found: dict[str, list[ContextCost]] = {}
    for cell in grid.cells():
        if cell.concurrency == concurrency:
            told = (record.phases.by_context for record in cell.records if record.phases)
            found.setdefault(cell.arm, []).extend(cost for costs in told for cost in costs)
    return {arm: _summed(costs) for arm, costs in found.items()}


def _summed(costs: Sequence[ContextCost]) -> list[ContextCost]:
    sums = []
    for context in sorted({cost.context for cost in costs}):
        here = [cost for cost in costs if cost.context == context]
        parts = [(cost.passes, cost.rows, cost.tokens, cost.draft_s, cost.verify_s) for cost in here]
        summed = ContextCost(context, *map(sum, zip(*parts, strict=True)))
        if summed.passes >= _FEWEST:
            sums.append(summed)
    return sums


def _reaches_far(arms: Iterable[Sequence[ContextCost]]) -> bool:
    contexts = [cost.context for costs in arms for cost in costs]
    return bool(contexts) and max(contexts) >= 2 * min(contexts)


def _draw(
    axis: Any,
    by_arm: dict[str, list[ContextCost]],
    value: Callable[[ContextCost], float | None],
    looks: dict[str, Look],
) -> None:
    for arm, costs in by_arm.items():
        points = [(cost.context, height) for cost in costs if (height := value(cost)) is not None]
        if points:
            look = looks[arm]
            xs, ys = zip(*points, strict=True)
            axis.plot(xs, ys, color=look.color, marker=look.marker, ls=look.dash, label=arm, markersize=4)
    top = max((max(line.get_ydata()) for line in axis.lines), default=1.0)
    axis.set_ylim(0, 1.1 * top if math.isfinite(top) else None)
    context_axis(axis, "tokens behind a request")
