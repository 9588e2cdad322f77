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
    draft: Annotated[
        list[str],
        typer.Option("--draft", "-d", help="A draft's folder, 'auto' (the one that ships), or 'ngram'. Repeatable."),
    ],
    model: options.Model = "embedded",
    count: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    depths: Annotated[str, typer.Option(help="Drafted tokens on the longest path; several as in 3,6.")] = "3",
    width: options.Width = 1,
    budget: options.Budget = 0,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    as_served: Annotated[
        bool, typer.Option("--as-served", help="Drafts in the precision that serving gives them, not as stored.")
    ] = False,
    borrowed_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens of a request's own text, unknown to a draft, that it may propose; 0: none."),
    ] = 64,
    kernels: options.Kernels = "auto",
) -> None:
    """Compare drafts: tokens a pass, by position, with and without looping answers; size; and is the text the same?

    The first draft is the one the others are held against. Example:

      slipstream eval drafts questions.jsonl -d draft-bf16 -d draft-fp8 -d draft-int4 -d ngram --count 200

      slipstream eval drafts questions.jsonl -d auto -d ngram --depths 3,6 --as-served
    """
    from slipstream.engine.config import EngineConfig
    from slipstream.engine.loading import LoadOptions, load
    from slipstream.speculation.sampling import SamplingParams
    from slipstream.train.compare import compare_drafts
    from slipstream.train.prompts import read_prompts

    console = Console()
    asked = read_prompts(prompts)[:count]
    engine = EngineConfig(borrowed_tokens=borrowed_tokens)
    loaded = load(LoadOptions(model, "none", kernels=options.kernel_choice(kernels), engine=engine))
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    shapes = [options.tree_shape(depth, width, budget) for depth in _depths(depths)]
    with Progress(console=console, transient=True) as bar:
        tasks = {name: bar.add_task(Path(name).name, total=len(asked) * len(shapes)) for name in draft}
        tasks["no draft"] = bar.add_task("no draft", total=len(asked))

        def advance(name: str, done: int) -> None:
            bar.advance(tasks[name], done)

        results = compare_drafts(loaded, draft, shapes, asked, params, as_served, advance)
    console.print(_table(results))
    if any(result.num_identical != result.num_answers for result in results):
        raise typer.Exit(1)


def _depths(text: str) -> list[int]:
    try:
        return [int(depth) for depth in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--depths {text}: numbers with commas between them, as in 3,6.") from None


def _table(results: "list[DraftResult]") -> Table:
    """One row a draft; the bar is its acceptance length, from 1 (nothing accepted) up."""
    shapes = {str(result.shape) for result in results}
    one_shape = f", {results[0].shape}" if len(shapes) == 1 else ""
    table = Table(title=f"{results[0].num_answers} prompts{one_shape}", title_justify="left")
    names = ("draft", "MB", "tokens a pass", "", "vs first", "by position", "without loops", "looping", "identical")
    for name in (*names[:1], *(() if one_shape else ("tree",)), *names[1:]):
        table.add_column(name, justify="left" if name in ("draft", "tree", "") else "right")
    first = results[0].stats.acceptance_length
    longest = max(result.stats.acceptance_length for result in results)
    for result in results:
        length = result.stats.acceptance_length
        table.add_row(
            Path(result.name).name,
            *(() if one_shape else (str(result.shape),)),
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
