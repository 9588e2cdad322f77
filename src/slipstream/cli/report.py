"""`slipstream report`: a page from any set of records."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    sources: Annotated[list[Path], typer.Argument(metavar="RECORDS...", help="Record files, or folders of them.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="the first folder given")] = None,
) -> None:
    """Write report.html (self-contained), report.md, report.csv, and every figure as SVG and PNG.

    Example:
      slipstream report out/bench/embedded
    """
    from slipstream.report.build import write_report

    first = sources[0] if sources[0].is_dir() else sources[0].parent
    files = write_report(sources, out or first)
    for headline in files.figures:
        print(f"{headline.figure}  {headline.words}")
    for line in files.headlines:
        print(line)
    print(f"{files.html}\n{files.markdown}\n{files.csv}\n{files.images}")
