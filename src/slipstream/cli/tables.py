"""Tables that fit a screen of 80 columns: names fold rather than lose letters, headings break between words."""

from collections.abc import Sequence

from rich import box
from rich.table import Table


def narrow_table(title: str, headings: Sequence[str], folding: Sequence[str] = ("",)) -> Table:
    """Return an empty table without vertical lines.

    Args:
        headings: a line break inside a heading is kept.
        folding: the columns of words: they stand left and fold where there is no room; the others hold numbers.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        words = heading in folding
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table
