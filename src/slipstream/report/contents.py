"""What a report holds, in order, before anyone decides how it is written."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.records.point import PointRecord
from slipstream.records.store import RecordSet
from slipstream.report import bars, lines, tables, times
from slipstream.report.headline import Headline, headline_figures
from slipstream.report.series import Grid
from slipstream.report.style import Plot
from slipstream.report.tables import Table

_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Section:
    """A heading with its paragraphs, tables and figures, in that order; `listing` is shown as it is typed."""

    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    listings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Contents:
    """The whole report: `figures` are what to read first, `headlines` the sentences below them."""

    title: str
    figures: tuple[Headline, ...]
    headlines: tuple[str, ...]
    sections: tuple[Section, ...]


def make_contents(records: RecordSet) -> Contents:
    """Arrange any set of records into a report."""
    grid = Grid(records.points)
    recipes = list(dict.fromkeys(record.provenance.recipe for record in records.points))
    sections = [section for section in _sections(records, grid) if section is not None]
    title = f"Speculative decoding: {', '.join(recipes)}" if recipes else "Accuracy"
    return Contents(title, tuple(headline_figures(grid)), tuple(_headlines(records, grid)), tuple(sections))


def named_plots(contents: Contents) -> dict[str, Plot]:
    """Return every figure by the name its files have: its number in the report, and its section."""
    plots = [(section.title, plot) for section in contents.sections for plot in section.plots]
    return {
        f"{number:02d}-{'-'.join(_WORD.findall(title.lower()))}": plot for number, (title, plot) in enumerate(plots, 1)
    }


def _headlines(records: RecordSet, grid: Grid) -> Iterator[str]:
    yield from tables.headlines(grid)
    invalid = sum(record.status == "invalid" for record in records.points)
    if invalid:
        yield f"{invalid} of {len(records.points)} points are invalid and counted nowhere; the reasons are below."
    for record in records.lossless:
        same = record.num_identical() == len(record.cases)
        word = "gives the same tokens as" if same else "does NOT always give the same tokens as"
        yield f"{record.arm} {word} {record.baseline_arm} ({record.num_identical()} of {len(record.cases)} outputs)."


def _sections(records: RecordSet, grid: Grid) -> Iterator[Section | None]:
    measured = [setting for setting in grid.settings if grid.concurrencies(setting)]
    if measured:
        yield Section("Throughput and speed-up", tables=tuple(tables.speedup_table(grid, s) for s in measured))
    yield _figures("Speed-up", lines.speedup_by_concurrency(grid), lines.speedup_by_context(grid))
    if measured:
        changes = [tables.delta_table(grid, setting) for setting in measured if len(grid.arms(setting)) > 1]
        yield Section(
            "Serving metrics",
            tables=(*changes, *(tables.detail_table(grid, s) for s in measured)),
            plots=tuple(bars.six_panels(grid, s) for s in measured),
        )
    yield _figures("Throughput against interactivity", lines.pareto(grid))
    yield _figures("Acceptance", lines.acceptance_by_position(grid))
    time_rows, plots = times.time_table(grid), _figures("", times.shares(grid), times.cost_by_context(grid))
    if time_rows and plots:
        yield Section("Where the time goes", tables=(time_rows,), plots=plots.plots)
    baselines = frozenset(record.baseline_arm for record in records.points) | {"no-spec"}
    yield _tables(
        "Accuracy",
        tables.gsm8k_table(records.gsm8k, baselines),
        tables.perplexity_table(records.perplexity),
        tables.lossless_table(records.lossless),
    )
    yield _tables(
        "What to be careful about", tables.invalid_table(records.points), tables.warning_table(records.points)
    )
    yield _provenance(records)


def _provenance(records: RecordSet) -> Section:
    hardware = dict.fromkeys(
        f"{h.cpu}, {h.num_cpus} CPUs, {h.memory_gib:g} GiB, {', '.join(h.devices) or 'no accelerator'}"
        f"{', ' + h.driver if h.driver else ''} ({h.machine})"
        for h in (
            *(record.provenance.hardware for record in records.points),
            *(record.hardware for record in records.gsm8k),
            *(record.hardware for record in records.lossless),
            *(record.hardware for record in records.perplexity),
        )
    )
    rows = dict.fromkeys(_provenance_row(record) for record in records.points)
    commands: dict[str, str] = {}
    for record in records.points:
        env = " ".join(f"{name}={value}" for name, value in record.provenance.env.items())
        command = f"{env} {' '.join(record.provenance.argv)}".strip()
        commands.setdefault(command, f"{record.key.arm}, {record.key.topology}")
    header = ("recipe", "arm", "server", "client", "recipe hash", "image", "measured")
    return Section(
        "Provenance",
        paragraphs=tuple(f"Measured from: {name}" for name in hardware),
        tables=(Table("Runs", header, tuple(rows)),) if rows else (),
        listings=tuple((name, command) for command, name in commands.items()),
    )


def _provenance_row(record: PointRecord) -> tuple[str, ...]:
    source = record.provenance
    return (
        source.recipe,
        record.key.arm,
        source.versions.get("server", "unknown"),
        f"slipstream {source.versions.get('slipstream', '?')}",
        source.recipe_sha256[:12],
        source.image or "–",
        source.started_at[:10],
    )


def _figures(title: str, *drawn: Plot | None) -> Section | None:
    found = tuple(plot for plot in drawn if plot is not None)
    return Section(title, plots=found) if found else None


def _tables(title: str, *made: Table | None) -> Section | None:
    found = tuple(table for table in made if table is not None)
    return Section(title, tables=found) if found else None
