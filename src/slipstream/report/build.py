"""Makes report.html, report.md, report.csv and the figures as files out of record files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.records.store import read_records, write_bytes, write_text
from slipstream.report.contents import make_contents, named_plots
from slipstream.report.headline import Headline
from slipstream.report.page import html_page
from slipstream.report.series import Grid
from slipstream.report.text import cells_csv, markdown


class ReportError(SlipstreamError):
    """There is nothing to report on."""


@dataclass(frozen=True)
class ReportFiles:
    """What was written."""

    html: Path
    markdown: Path
    csv: Path
    headlines: tuple[str, ...]
    figures: tuple[Headline, ...]
    images: Path


def write_report(sources: Sequence[Path], out: Path) -> ReportFiles:
    """Read every record in `sources` (files or folders) and write the report into the folder `out`."""
    records = read_records(sources)
    if not (records.points or records.gsm8k or records.lossless or records.perplexity):
        raise ReportError(f"{', '.join(map(str, sources))}: no records there. Run `slipstream bench run` first.")
    contents = make_contents(records)
    names = (out / "report.html", out / "report.md", out / "report.csv")
    files = ReportFiles(*names, contents.headlines, contents.figures, out / "figures")
    write_text(files.html, html_page(contents))
    write_text(files.markdown, markdown(contents))
    write_text(files.csv, cells_csv(Grid(records.points)))
    for name, plot in named_plots(contents).items():
        write_bytes(files.images / f"{name}.svg", plot.svg())
        write_bytes(files.images / f"{name}.png", plot.png())
    return files
