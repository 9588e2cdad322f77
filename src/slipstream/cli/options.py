"""Options that several verbs share, and how they become an engine with a progress bar while it loads."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.cli.progress import Phase, Phases

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.kernels import KernelChoice
    from slipstream.speculation.tree import TreeShape

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A folder, a .gguf file, a hub id, or 'embedded'.", show_default=True),
]
Draft = Annotated[
    str,
    typer.Option("--draft", "-d", help="A draft's folder or hub id, 'ngram', 'none', or 'auto' (the one that ships)."),
]
Depth = Annotated[int, typer.Option(help="Drafted tokens on the longest path.")]
AutoDepth = Annotated[
    int | None, typer.Option(help="Drafted tokens on the longest path.", show_default="as far as it pays")
]
Width = Annotated[int, typer.Option(help="Nodes expanded on each level; 1 is a chain.")]
Budget = Annotated[int, typer.Option(help="Drafted nodes to check in one pass; 0 checks every candidate.")]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        "--max-model-len",
        "--context-length",
        help="Tokens of prompt and answer together.",
        show_default="what the model allows: on a CPU up to 4096, on a GPU or with a memory fraction what fits",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of the answer at most.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that make up this share.")]
TopK = Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text, with a draft or without.")]
Device = Annotated[str, typer.Option(help="auto, cpu, or cuda[:N].")]
Tp = Annotated[int, typer.Option(help="Ranks the model is split over; started here unless torchrun did.")]
Ep = Annotated[int, typer.Option(help="Groups of the ranks that experts are dealt to.")]
DraftTp = Annotated[int, typer.Option(help="1 keeps the draft whole, on the first rank; --tp's value splits it too.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Kernels = Annotated[str, typer.Option(help="auto, or a kernel path by name (see `slipstream doctor`).")]


def tree_shape(depth: int, width: int, budget: int) -> "TreeShape":
    """Return the tree the options ask for."""
    from slipstream.speculation.tree import TreeShape

    return TreeShape(depth=depth, width=width, budget=budget)


def auto_tree(depth: int | None, width: int, budget: int) -> "TreeShape | None":
    """Return the tree the options ask for; None, to draft as far as it pays, if they ask for nothing."""
    from slipstream.speculation.tree import TreeShape

    if depth is None and width == 1 and budget == 0:
        return None
    return TreeShape(depth=TreeShape.depth if depth is None else depth, width=width, budget=budget)


def kernel_choice(name: str) -> "KernelChoice":
    """Return the kernel path asked for, or say which there are."""
    from slipstream.kernels import KERNEL_CHOICES

    for choice in KERNEL_CHOICES:
        if name == choice:
            return choice
    raise typer.BadParameter(f"--kernels {name}: it is {' or '.join(KERNEL_CHOICES)}.")


def fetch_embedded(console: Console) -> "Path":
    """Return the embedded model's file, with progress on the first run."""
    from slipstream.checkpoint.embedded import embedded_model

    with Phases(console) as phases:
        current: list[Phase] = []

        def report(stage: str, fraction: float) -> None:
            if not current or current[-1].name != stage:
                current.append(phases.start(stage, total=1.0))
            current[-1].done = fraction

        return embedded_model(report)


def fetch_if_embedded(model: str, console: Console) -> None:
    """Fetch the embedded model now, with progress, if that is the one meant."""
    from slipstream.checkpoint.hub import is_embedded

    if is_embedded(model):
        fetch_embedded(console)
