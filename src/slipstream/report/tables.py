"""Tables of a report as plain values: HTML, Markdown and CSV are only ways of writing them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.records.compare import Speedup, mcnemar
from slipstream.records.evals import FILTERS, Gsm8kRecord, LosslessRecord, PerplexityRecord, changed
from slipstream.records.point import PointRecord
from slipstream.report.series import (
    Cell,
    Grid,
    Metric,
    Setting,
    acceptance_length,
    e2e_median,
    itl_median,
    itl_token_median,
    output_per_device,
    output_tok_s,
    total_per_device,
    tpot_median,
    tpot_p99,
    ttft_median,
)

_FIGURES = re.compile(r"[\d.]+")

MARKS = {"faster": "▲", "same": "=", "slower": "▼", "unclear": "?"}

COLUMNS: tuple[tuple[str, str, Metric, str], ...] = (
    ("output tok/s", "tok/s", output_tok_s, ".1f"),
    ("tok/s/device", "/device", output_per_device, ".1f"),
    ("total tok/s/device", "total", total_per_device, ".1f"),
    ("TTFT ms", "TTFT", ttft_median, ".1f"),
    ("TPOT ms", "TPOT", tpot_median, ".2f"),
    ("TPOT p99", "p99", tpot_p99, ".1f"),
    ("ITL ms", "ITL", itl_median, ".1f"),
    ("ITL by token ms", "by token", itl_token_median, ".2f"),
    ("E2E ms", "E2E", e2e_median, ".0f"),
    ("accept length", "accept", acceptance_length, ".2f"),
)
"""Each figure's name where it stands alone (CSV), its name at the head of a table of 80 columns, and its form."""

DELTAS: tuple[tuple[str, Metric, bool], ...] = (
    ("TPOT", tpot_median, False),
    ("tok/s", output_tok_s, True),
    ("ITL", itl_token_median, False),
    ("TTFT", ttft_median, False),
)
"""Figures whose change is shown, and whether more is better."""


@dataclass(frozen=True)
class Table:
    """A caption, a header, rows of text, and a remark below."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def speedup_table(grid: Grid, setting: Setting) -> Table:
    """Return the published form: tokens per second and device for each arm, with the speed-up in brackets."""
    arms = grid.arms(setting)
    rows = []
    for concurrency in grid.concurrencies(setting):
        row = [str(concurrency)]
        for arm in arms:
            cell = grid.cell(setting, arm, concurrency)
            row.append(_with_speedup(grid, cell) if cell else "–")
        rows.append(tuple(row))
    note = (
        "In brackets the speed-up, below it its 95% interval, paired by seed. "
        "▲ faster, ▼ slower, = same (within 5%), ? not told apart by these seeds."
    )
    bases = {arm: grid.baseline(setting, arm) for arm in arms}
    several = len(set(bases.values())) > 1
    names = [f"{arm} (over {base})" if several and arm != base else arm for arm, base in bases.items()]
    over = "" if several else f" over {grid.baseline(setting, arms[0])}"
    caption = f"{setting.title()}: output tok/s per device, and speed-up{over}"
    return Table(caption, ("Concurrency", *names), tuple(rows), note)


def delta_table(grid: Grid, setting: Setting) -> Table:
    """Return the other published form: each metric of each arm, and its change against the baseline in per cent.

    The sign is the figure's own: less is better where the arrow points down.
    """
    arms = grid.arms(setting)
    rows = []
    for concurrency in grid.concurrencies(setting):
        for name, metric, higher_is_better in DELTAS:
            cells = [grid.cell(setting, arm, concurrency) for arm in arms]
            shown = [_with_delta(grid, cell, metric, higher_is_better) if cell else "–" for cell in cells]
            rows.append((str(concurrency), f"{name} {'↑' if higher_is_better else '↓'}", *shown))
    bases = {arm: grid.baseline(setting, arm) for arm in arms}
    several = len(set(bases.values())) > 1
    names = [f"{arm} (Δ from {base})" if several and arm != base else arm for arm, base in bases.items()]
    note = (
        "Medians in ms; ITL by token, as SGLang's client counts it. ↓ less is better, ↑ more is better. ▲ better, "
        "▼ worse, = same (within 5%), ? not told apart by these seeds."
    )
    caption = f"{setting.title()}: change (Δ)" + ("" if several else f" from {bases[arms[0]]}")
    return Table(caption, ("Conc.", "metric", *names), tuple(rows), note)


def detail_table(grid: Grid, setting: Setting) -> Table:
    """Return every metric of every arm, but for E2E, as means over seeds; of one device, nothing is said by device."""
    cells = [
        cell for c in grid.concurrencies(setting) for arm in grid.arms(setting) if (cell := grid.cell(setting, arm, c))
    ]
    one_device = all(cell.mean(output_tok_s) == cell.mean(output_per_device) for cell in cells)
    left_out = (e2e_median, *([output_per_device] if one_device else []))
    columns = [column for column in COLUMNS if column[2] not in left_out]
    rows = [
        (str(cell.concurrency), cell.arm, *(number(cell.mean(metric), form) for *_, metric, form in columns))
        for cell in cells
    ]
    seeds = sorted({len(cell.records) for cell in cells})
    note = (
        f"Medians within a run in ms (p99: of TPOT), averaged over {' to '.join(map(str, seeds[:1] + seeds[1:][-1:]))} "
        "seeds. Total: prompts' tokens too, per device. ITL: the gap between streamed chunks; by token: divided by the "
        "chunk's tokens."
    )
    return Table(f"{setting.title()}: all figures", ("Conc.", "arm", *(c[1] for c in columns)), tuple(rows), note)


def gsm8k_table(records: Sequence[Gsm8kRecord], baselines: frozenset[str]) -> Table | None:
    """Return accuracy by arm, with the answers that changed against the baseline."""
    if not records:
        return None
    base = next((record for record in records if record.arm in baselines), records[0])
    rows = [(*_scores(record), *_changes(base, record)) for record in records]
    header = ("arm", "shots", "questions", "flexible-extract", "strict-match", "became right / wrong", "McNemar p")
    return Table("GSM8K", header, tuple(rows), f"Changes are paired with {base.arm}, flexible-extract.")


def perplexity_table(records: Sequence[PerplexityRecord]) -> Table | None:
    """Return each arm's perplexity, and how its tokens' log probabilities changed against its baseline."""
    scored = [record for record in records if record.num_tokens]
    if not scored:
        return None
    rows = [
        (
            record.arm,
            record.baseline_arm or "–",
            str(len(record.items)),
            str(record.num_tokens),
            f"{record.perplexity():.4f}",
            _log_change(record),
        )
        for record in scored
    ]
    note = "Change: of a token's log probability (natural log) from the baseline, with its standard error over texts."
    return Table("Perplexity", ("arm", "baseline", "texts", "tokens", "perplexity", "change"), tuple(rows), note)


def lossless_table(records: Sequence[LosslessRecord]) -> Table | None:
    """Return how many outputs are identical and where the first difference lies."""
    if not records:
        return None
    rows = []
    for record in records:
        differences = [case.difference for case in record.cases if case.difference]
        worst = max((d.top_two_margin for d in differences if d.top_two_margin is not None), default=None)
        first = min((d.position for d in differences), default=None)
        rows.append(
            (
                f"{record.arm} against {record.baseline_arm}",
                f"{record.num_identical()} of {len(record.cases)}",
                "–" if first is None else str(first),
                number(worst, ".4f"),
            )
        )
    header = ("arms", "identical outputs", "earliest difference (token)", "largest top-two margin there")
    return Table("Token for token", header, tuple(rows))


def invalid_table(records: Sequence[PointRecord]) -> Table | None:
    """Return the points that did not count and why."""
    rows = [(name_of(r), "; ".join(r.reasons)) for r in records if r.status == "invalid"]
    return Table("Invalid points, left out of every figure", ("point", "reason"), tuple(rows)) if rows else None


def warning_table(records: Sequence[PointRecord]) -> Table | None:
    """Return warnings; those that differ only in their figures share a row, with the first as example."""
    points: dict[str, list[tuple[str, str]]] = {}
    for record in records:
        for warning in record.warnings:
            where = f"{record.key.arm} {record.key.workload}"
            points.setdefault(_FIGURES.sub("#", warning), []).append((warning, where))
    rows = [
        (found[0][0], str(len(found)), ", ".join(dict.fromkeys(where for _, where in found)))
        for found in points.values()
    ]
    return Table("Warnings", ("warning (first of its kind)", "points", "where"), tuple(rows)) if rows else None


def headlines(grid: Grid) -> Iterator[str]:
    """Yield one sentence for each arm and setting: its best and worst speed-up, and how many loads it wins."""
    for setting in grid.settings:
        for arm in grid.arms(setting):
            found: list[tuple[Speedup, Cell]] = []
            for concurrency in grid.concurrencies(setting):
                cell = grid.cell(setting, arm, concurrency)
                ratio = grid.speedup(cell, output_per_device) if cell else None
                if cell and ratio:
                    found.append((ratio, cell))
            if not found:
                continue
            low, low_cell = min(found, key=lambda pair: pair[0].ratio)
            high, high_cell = max(found, key=lambda pair: pair[0].ratio)
            reach = f"{high.ratio:.2f}x ({interval(high)}) at concurrency {high_cell.concurrency}"
            if len(found) > 1:
                reach += f", {low.ratio:.2f}x ({interval(low)}) at {low_cell.concurrency}"
            yield f"{arm} against {grid.baseline(setting, arm)}, {setting.title()}: {reach}; {_counts(found)}."


def name_of(record: PointRecord) -> str:
    """Return a point's name for a reader."""
    key = record.key
    return f"{key.arm}, {key.workload} on {key.topology}, concurrency {key.concurrency}, seed {key.seed}"


def number(value: float | None, form: str) -> str:
    """Format a number, or a dash for none."""
    return "–" if value is None else format(value, form)


def interval(ratio: Speedup) -> str:
    """Return a speed-up's interval for a reader."""
    return f"{ratio.low:.2f}–{ratio.high:.2f}" if ratio.num_pairs > 1 else "one seed"


def _with_speedup(grid: Grid, cell: Cell) -> str:
    text = number(cell.mean(output_per_device), ".1f")
    ratio = grid.speedup(cell, output_per_device)
    return f"{text} ({ratio.ratio:.2f}x) {MARKS[ratio.verdict]}\n{interval(ratio)}" if ratio else text


def _with_delta(grid: Grid, cell: Cell, metric: Metric, higher_is_better: bool) -> str:
    mean = cell.mean(metric)
    text = number(mean, ".2f" if mean is not None and mean < 10 else ".1f")
    ratio = grid.speedup(cell, metric, higher_is_better)
    if ratio is None:
        return text
    change = 100 * ((ratio.ratio if higher_is_better else 1 / ratio.ratio) - 1)
    return f"{text} ({change:{'+.1f' if abs(change) < 100 else '+.0f'}}%) {MARKS[ratio.verdict]}".replace("-", "−")


def _counts(found: Sequence[tuple[Speedup, Cell]]) -> str:
    words = {"faster": "faster", "same": "the same", "slower": "slower", "unclear": "not told apart"}
    verdicts = [ratio.verdict for ratio, _ in found]
    parts = [f"{word} at {verdicts.count(v)}" for v, word in words.items() if v in verdicts]
    return f"{', '.join(parts)} of {len(found)} loads"


def _log_change(record: PerplexityRecord) -> str:
    if record.baseline_arm is None:
        return "–"
    mean, error = record.change()
    return f"{mean:+.5f} ± {error:.5f}".replace("-", "−")


def _scores(record: Gsm8kRecord) -> tuple[str, ...]:
    scores = (f"{record.score(which):.4f}" for which in FILTERS)
    return (record.arm, str(record.num_shots), str(len(record.items)), *scores)


def _changes(base: Gsm8kRecord, record: Gsm8kRecord) -> tuple[str, str]:
    if record is base:
        return "–", "–"
    if (base.data_sha256, base.num_shots, base.chat) != (record.data_sha256, record.num_shots, record.chat):
        return "not the same questions", "–"
    changes = changed(base.items, record.items, "flexible")
    right, wrong = len(changes.to_right), len(changes.to_wrong)
    return f"{right} / {wrong}", f"{mcnemar(right, wrong):.3f}"
