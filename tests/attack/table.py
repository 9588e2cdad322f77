"""The report of an attack: a table of at most 80 columns, every violation, and a verdict."""

import textwrap
from collections.abc import Sequence

from tests.attack.campaign import Row

_WIDTH = 80
_SHOWN_PER_GROUP = 40
_HEAD = (
    f"{'group':<14}{'attacks':>8}{'2xx':>7}{'4xx':>7}{'5xx':>6}{'cut':>6}{'health':>8}{'beside':>8}{'+MiB':>8}{'s':>6}"
)


def report(rows: Sequence[Row]) -> str:
    """Return the table, what was violated, and the verdict."""
    lines = [_HEAD, "-" * len(_HEAD), *map(_line, rows), ""]
    for row in rows:
        for violation in row.violations[:_SHOWN_PER_GROUP]:
            lines += textwrap.wrap(f"! {row.group}: {violation}"[:400], _WIDTH, subsequent_indent="    ")
        if len(row.violations) > _SHOWN_PER_GROUP:
            lines.append(f"! {row.group}: {len(row.violations) - _SHOWN_PER_GROUP} more")
    num_violations = sum(len(row.violations) for row in rows)
    num_attacks = sum(row.num_attacks for row in rows)
    verdict = "nothing it promises was broken" if not num_violations else f"{num_violations} violations"
    return "\n".join([*lines, f"{num_attacks} attacks: {verdict}"])


def _line(row: Row) -> str:
    def among(low: int, high: int) -> int:
        return sum(count for status, count in row.statuses.items() if low <= status < high)

    counts = [(among(200, 300), 7), (among(300, 500), 7), (among(500, 600), 6), (row.statuses[0], 6)]
    return (
        f"{row.group:<14}{row.num_attacks:>8}"
        + "".join(f"{count:>{width}}" for count, width in counts)
        + f"{row.longest_wait_s:>7.1f}s{row.num_answers:>8}{row.peak_mib:>+8.0f}{row.seconds:>6.0f}"
    )
