"""Writes a report as one HTML page that needs nothing else: no network, no script, good on a phone and on paper."""

from collections.abc import Iterator
from html import escape

from slipstream.report.contents import Contents, Section
from slipstream.report.style import Plot
from slipstream.report.tables import Table

CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1a1a1a; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 2px solid #1a1a1a; }
.headlines { margin: 0; padding: .75rem 1rem .75rem 2rem; background: #f4f4f1; border-left: 4px solid #1a1a1a; }
.figures { display: flex; flex-wrap: wrap; gap: .75rem; margin: 0 0 1rem; }
.figures div { flex: 1 1 14rem; border: 1px solid #777; border-radius: .4rem; padding: .6rem .9rem; }
.figures strong { display: block; font-size: 2rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.figures span { font-size: .85rem; color: #444; }
.headlines li { margin: .25rem 0; }
nav { margin: 1rem 0 0; font-size: .9rem; }
nav a { margin-right: 1rem; white-space: nowrap; color: #0b5c8a; }
.scroll { overflow-x: auto; margin: 0 0 1.25rem; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #d5d5d0; text-align: right; vertical-align: top; }
th { border-bottom: 2px solid #777; font-weight: 600; text-align: right; }
th.text, td.text { text-align: left; }
.short { white-space: nowrap; }
small { color: #555; white-space: nowrap; }
.note { font-size: .8rem; color: #555; margin: -.75rem 0 1.25rem; }
figure { margin: 1rem 0 1.5rem; }
figure img { width: 100%; height: auto; display: block; }
.scroll figure { min-width: 34rem; }
figcaption { font-size: .85rem; color: #444; margin-top: .35rem; }
pre { overflow-x: auto; background: #f4f4f1; padding: .6rem .8rem; font-size: .75rem; line-height: 1.4;
      white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0 1rem; }
footer { margin-top: 3rem; font-size: .8rem; color: #555; }
@media (max-width: 40rem) {
  body { font-size: 15px; }
  h1 { font-size: 1.3rem; }
  th, td { padding: .25rem .4rem; }
}
@media print {
  @page { margin: 14mm; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  body { font-size: 10pt; }
  table { font-size: 7.5pt; }
  th, td { padding: .15rem .3rem; }
  .scroll { overflow: visible; }
  .scroll figure { min-width: 0; }
  .headlines { background: none; border: 1px solid #777; border-left-width: 4px; }
  h2 { break-after: avoid; }
  figure, tr, .headlines, .figures div { break-inside: avoid; }
}
"""

SHORT = 32
"""Cells up to this long never break, so that an arm's name stays on one line."""


def html_page(contents: Contents) -> str:
    """Return the whole page."""
    return "\n".join(_page(contents)) + "\n"


def _page(contents: Contents) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(contents.title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>"
    yield f"<h1>{escape(contents.title)}</h1>"
    if contents.figures:
        yield '<div class="figures">'
        for headline in contents.figures:
            yield f"<div><strong>{escape(headline.figure)}</strong><span>{escape(headline.words)}</span></div>"
        yield "</div>"
    if contents.headlines:
        yield '<ul class="headlines">'
        yield from (f"<li>{escape(line)}</li>" for line in contents.headlines)
        yield "</ul>"
    links = (f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(contents.sections))
    yield f"<nav>{' '.join(links)}</nav>"
    for index, section in enumerate(contents.sections):
        yield from _section(index, section)
    yield "<footer>Made by slipstream report from record files alone; rerun the recipe to check a figure.</footer>"
    yield "</main>\n</body>\n</html>"


def _section(index: int, section: Section) -> Iterator[str]:
    yield f'<section id="s{index}">\n<h2>{escape(section.title)}</h2>'
    yield from (f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs)
    for plot in section.plots:
        yield _figure(plot)
    for table in section.tables:
        yield from _table(table)
    for name, text in section.listings:
        yield f"<p>{escape(name)}</p>\n<pre>{escape(text)}</pre>"
    yield "</section>"


def _table(table: Table) -> Iterator[str]:
    text_columns = [
        any(row[column] and not _is_number(row[column]) for row in table.rows) for column in range(len(table.header))
    ]
    kinds = [' class="text"' if is_text else "" for is_text in text_columns]
    yield f'<div class="scroll"><table>\n<caption>{escape(table.caption)}</caption>'
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, table.header, strict=True))
    yield f"<thead><tr>{head}</tr></thead>\n<tbody>"
    for row in table.rows:
        cells = "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note">{escape(table.note)}</p>'


def _cell(text: str) -> str:
    first, _, second = text.partition("\n")
    small = f"<br><small>{escape(second)}</small>" if second else ""
    return (f'<span class="short">{escape(first)}</span>' if len(first) < SHORT else escape(first)) + small


def _figure(plot: Plot) -> str:
    return (
        f'<div class="scroll"><figure><img src="{plot.image}" alt="{escape(plot.alt)}">'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure></div>"
    )


def _is_number(cell: str) -> bool:
    """Say whether a cell is a figure (a speed-up may follow), not a sentence that opens with one."""
    return cell == "–" or (cell[:1].isdigit() and len(cell) < SHORT)
