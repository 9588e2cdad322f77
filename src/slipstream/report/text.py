"""Writes a report as Markdown, and every cell's figures as CSV."""

import csv
import io
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from slipstream.report.contents import Contents, Section, named_plots
from slipstream.report.series import Grid, input_tokens, interactivity, output_per_device
from slipstream.report.tables import COLUMNS, Table


def markdown(contents: Contents) -> str:
    """Return the report as Markdown; figures are the files beside it."""
    figures = [f"**{headline.figure}** {_plain(headline.words)}\n" for headline in contents.figures]
    lines = [f"# {contents.title}", "", *figures, *(f"- {_plain(line)}" for line in contents.headlines)]
    names = {id(plot): name for name, plot in named_plots(contents).items()}
    for section in contents.sections:
        lines += _section(section, names)
    return "\n".join(lines) + "\n"


def cells_csv(grid: Grid) -> str:
    """Return one row for each arm at each load, with the speed-up and its interval."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = [name for name, *_ in COLUMNS]
    head = ["recipe", "topology", "workload", "concurrency", "arm", "seeds", "input tokens", *names, "tok/s/user"]
    writer.writerow([*head, "speedup", "speedup low", "speedup high", "verdict"])
    for cell in grid.cells():
        ratio = grid.speedup(cell, output_per_device)
        figures = [
            cell.mean(metric) for metric in (input_tokens, *(metric for *_, metric, _ in COLUMNS), interactivity)
        ]
        place = [cell.setting.recipe, cell.setting.topology, cell.setting.workload, cell.concurrency, cell.arm]
        compared = [f"{ratio.ratio:.6g}", f"{ratio.low:.6g}", f"{ratio.high:.6g}", ratio.verdict] if ratio else [""] * 4
        values = ["" if value is None else f"{value:.6g}" for value in figures]
        writer.writerow([*place, len(cell.records), *values, *compared])
    return buffer.getvalue()


def _section(section: Section, names: Mapping[int, str]) -> Iterator[str]:
    yield ""
    yield f"## {section.title}"
    for paragraph in section.paragraphs:
        yield ""
        yield _plain(paragraph)
    for plot in section.plots:
        yield ""
        yield f"![{_plain(plot.alt)}](figures/{names[id(plot)]}.svg)"
        yield ""
        yield f"*{_plain(plot.caption)}*"
    for table in section.tables:
        yield from _table(table)
    for name, text in section.listings:
        yield from ("", f"{_plain(name)}:", "", "```", text, "```")


def _table(table: Table) -> Iterator[str]:
    yield from ("", f"**{_plain(table.caption)}**", "")
    yield f"| {' | '.join(map(_cell, table.header))} |"
    yield f"|{'---|' * len(table.header)}"
    for row in table.rows:
        # A cell's second line (an interval) is a row of its own, so that the table stays as narrow as its figures.
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            yield f"| {' | '.join(map(_cell, line))} |"
    if table.note:
        yield from ("", _plain(table.note))


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Keep server-made text from being read as markup."""
    return text.replace("<", "&lt;").replace("\n", ", ")
