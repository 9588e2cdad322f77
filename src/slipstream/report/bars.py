"""Bar charts of a report: serving metrics side by side."""

from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from slipstream.report.series import (
    Grid,
    Metric,
    Setting,
    acceptance_length,
    itl_token_median,
    output_tok_s,
    tpot_median,
    tpot_p99,
    ttft_median,
)
from slipstream.report.style import Look, Plot, legend_below, looks_of, new_figure, to_svg

PANELS: tuple[tuple[str, Metric], ...] = (
    ("(a) TPOT median, ms (less is better)", tpot_median),
    ("(b) output tok/s (more is better)", output_tok_s),
    ("(c) TPOT p99, ms (less is better)", tpot_p99),
    ("(d) ITL by token, median, ms (less is better)", itl_token_median),
    ("(e) TTFT median, ms, log axis", ttft_median),
    ("(f) acceptance length", acceptance_length),
)
_WHISKERS = {"elinewidth": 0.8, "capsize": 1.5, "ecolor": "black"}


def six_panels(grid: Grid, setting: Setting) -> Plot:
    """Draw the serving metrics, arms side by side at each concurrency."""
    looks = looks_of(grid.all_arms())
    figure, axes = new_figure(6.6, 3, 2)
    for axis, (title, metric) in zip(axes.flat, PANELS, strict=True):
        _bars(axis, grid, setting, metric, looks)
        axis.set_title(title, fontsize=9, loc="left")
        if metric is ttft_median:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
        if metric is acceptance_length and not axis.patches:
            axis.text(0.5, 0.5, "no arm drafted", ha="center", transform=axis.transAxes, color="#555555")
    legend_below(figure, axes)
    caption = f"Serving metrics, {setting.title()}. Bars are means over seeds, whiskers their range."
    alt = f"Six bar charts by concurrency for arms {', '.join(grid.arms(setting))}"
    return Plot(caption, to_svg(figure), alt, figure)


def _bars(axis: Any, grid: Grid, setting: Setting, metric: Metric, looks: dict[str, Look]) -> None:
    arms, concurrencies = grid.arms(setting), grid.concurrencies(setting)
    width = 0.8 / max(1, len(arms))
    for index, arm in enumerate(arms):
        xs, heights, below, above = [], [], [], []
        for place, concurrency in enumerate(concurrencies):
            cell = grid.cell(setting, arm, concurrency)
            values = list(cell.by_seed(metric).values()) if cell else []
            if values:
                mean = sum(values) / len(values)
                xs.append(place + (index - (len(arms) - 1) / 2) * width)
                heights.append(mean)
                below.append(max(0.0, mean - min(values)))
                above.append(max(0.0, max(values) - mean))
        look = looks[arm]
        style = {"color": look.color, "hatch": look.hatch, "edgecolor": "white", "linewidth": 0.4}
        axis.bar(xs, heights, width * 0.94, yerr=[below, above] if xs else None, label=arm, error_kw=_WHISKERS, **style)
    axis.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    axis.set_xlim(-0.5, len(concurrencies) - 0.5)
    axis.set_xlabel("concurrency", fontsize=8)
    axis.margins(y=0.12)
