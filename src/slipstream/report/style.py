"""How arms look in every figure: told apart by shade, hatch, marker and dash, so that print in grey still reads."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

WIDTH_IN = 7.6


@dataclass(frozen=True)
class Look:
    """One arm's look."""

    color: str
    hatch: str
    marker: str
    dash: str


# From dark to light, so that the order survives in grey; hues that colour-blind readers keep apart.
LOOKS = (
    Look("#4a4a4a", "", "o", "-"),
    Look("#0b6fa4", "///", "s", "--"),
    Look("#c8501e", "...", "^", "-."),
    Look("#2a9d77", "\\\\\\", "D", ":"),
    Look("#d9a514", "xxx", "v", (0, (5, 1))),  # type: ignore[arg-type]  # matplotlib takes dash tuples too
    Look("#b58bd0", "++", "P", "-"),
    Look("#8fc1e3", "oo", "X", "--"),
    Look("#e9b7a0", "--", "*", "-."),
)


@dataclass(frozen=True)
class Plot:
    """A figure ready to be shown: its image, its caption, words for those who cannot see it, and what drew it."""

    caption: str
    image: str
    alt: str
    figure: Figure | None = field(default=None, repr=False, compare=False)

    def svg(self) -> bytes:
        """Return the image as a file's bytes."""
        return base64.b64decode(self.image.partition(",")[2])

    def png(self) -> bytes:
        """Return the image in pixels, for slides and web pages that take no SVG."""
        assert self.figure is not None, "only called on figures that were drawn here"
        buffer = io.BytesIO()
        with mpl.rc_context(RC):
            self.figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
        return buffer.getvalue()


def looks_of(arms: Sequence[str]) -> dict[str, Look]:
    """Give every arm its look by its place in the list."""
    return {arm: LOOKS[index % len(LOOKS)] for index, arm in enumerate(arms)}


def new_figure(height_in: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """Return a figure and its axes (always a two-dimensional array)."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    with mpl.rc_context(RC):
        axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, axes


def legend_below(figure: Figure, axes: Any) -> None:
    """Put one legend below all panels, each arm in it once."""
    labels: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    if labels:
        columns = min(4, len(labels))
        place = {"loc": "outside lower center", "ncols": columns, "fontsize": 8, "frameon": False}
        figure.legend(labels.values(), labels.keys(), **place)


def hide_unused(axes: Any, used: int) -> None:
    """Take away the panels of a grid that hold nothing."""
    for axis in list(axes.flat)[used:]:
        axis.set_visible(False)


def to_svg(figure: Figure) -> str:
    """Return a figure as a data address; equal figures give equal bytes."""
    buffer = io.StringIO()
    with mpl.rc_context(RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue().encode("utf-8")).decode("ascii")


RC = {"svg.hashsalt": "slipstream", "hatch.linewidth": 0.5, "font.size": 9, "font.family": "DejaVu Sans"}
