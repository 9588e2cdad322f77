"""`slipstream eval drafts`: acceptance of several drafts on the same prompts, beside their size, with proof."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from slipstream.cli import options

if TYPE_CHECKING:
    from slipstream.train.compare import DraftResult

_BAR_WIDTH = 20


def drafts(
    prompts: Annotated[Path, typer.Argument(help="JSON lines (or .xz) of questions, prompts or conversations.")],
    draft: Annotated[list[str], typer.Option("--draft", "-d", help="A draft's folder, or 'ngram'. Repeatable.")],
    model: options.Model = "embedded",
    count: Annotated[int | None, typer.Option(help="Only the first N prompts.")] = None,
    depth: options.Depth = 3,
    width: options.Width = 1,
    budget: options.Budget = 0,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    kernels: options.Kernels = "auto",
) -> None:
    """Compare drafts: tokens a pass, by position, with and without looping answers; size; and is the text the same?

    The first draft is the one the others are held against. Example:

      slipstream eval drafts questions.jsonl -d draft-bf16 -d draft-fp8 -d draft-int4 -d ngram --count 200
    """
    from slipstream.engine.loading import LoadOptions, load
    from slipstream.speculation.sampling import SamplingParams
    from slipstream.train.compare import compare_drafts
    from slipstream.train.prompts import read_prompts

    console = Console()
    asked = read_prompts(prompts)[:count]
    loaded = load(LoadOptions(model, "none", kernels=options.kernel_choice(kernels)))
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    with Progress(console=console, transient=True) as bar:
        tasks = {name: bar.add_task(Path(name).name, total=len(asked)) for name in ("no draft", *draft)}

        def advance(name: str, done: int) -> None:
            bar.advance(tasks[name], done)

        results = compare_drafts(loaded, draft, options.tree_shape(depth, width, budget), asked, params, advance)
    console.print(_table(results))
    if any(result.num_identical != result.num_answers for result in results):
        raise typer.Exit(1)


def _table(results: "list[DraftResult]") -> Table:
    """One row a draft; the bar is its acceptance length, from 1 (nothing accepted) up."""
    table = Table(title=f"{results[0].num_answers} prompts", title_justify="left")
    for name in (
        "draft",
        "MB",
        "tokens a pass",
        "",
        "vs first",
        "by position",
        "without loops",
        "looping",
        "identical",
    ):
        table.add_column(name, justify="left" if name in ("draft", "") else "right")
    first = results[0].stats.acceptance_length
    longest = max(result.stats.acceptance_length for result in results)
    for result in results:
        length = result.stats.acceptance_length
        table.add_row(
            Path(result.name).name,
            f"{result.nbytes / 1e6:.1f}",
            f"{length:.3f}",
            "█" * max(1, round(_BAR_WIDTH * (length - 1) / max(longest - 1, 1e-9))),
            f"{length / first - 1:+.1%}",
            " ".join(f"{rate:.2f}" for rate in result.stats.rates),
            f"{result.straight.acceptance_length:.3f}",
            f"{result.num_looping / result.num_answers:.1%}",
            f"{result.num_identical} of {result.num_answers}",
        )
    return table
