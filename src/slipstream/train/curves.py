"""The curves of a run as one picture: loss, accuracy by draft position, and acceptance length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slipstream.train.corpus import disk_error


def draw_curves(history: Sequence[dict[str, Any]], path: Path) -> None:  # records, hence Any
    """Write a PNG of a run's history."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    loss, accuracy, acceptance = figure.subplots(1, 3)
    steps = [entry["step"] for entry in history]
    loss.plot(steps, [entry["loss"] for entry in history], color="black")
    loss.set_title("loss (sum over positions)")
    for position in range(len(history[0]["accuracy"]) if history else 0):
        accuracy.plot(steps, [entry["accuracy"][position] for entry in history], label=f"position {position + 1}")
    accuracy.set_title("agreement with the target")
    measured = [entry for entry in history if entry["acceptance"]]
    for name in measured[0]["acceptance"] if measured else ():
        values = [entry["acceptance"][name] for entry in measured]
        acceptance.plot([entry["step"] for entry in measured], values, marker="o", label=name)
    acceptance.set_title("acceptance length")
    for axes in (loss, accuracy, acceptance):
        _finish(axes)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def _finish(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
