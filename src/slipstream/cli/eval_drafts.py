"""`slipstream eval drafts`: acceptance and speed of several drafts on the same prompts, with proof."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli import options
from slipstream.cli.progress import Phases
from slipstream.cli.tables import narrow_table

if TYPE_CHECKING:
    from slipstream.records.compare import Speedup
    from slipstream.train.draft.compare import DraftResult

_FEWEST_GROUPS = 5  # an interval needs several groups of prompts


def drafts(
    prompts: Annotated[Path, typer.Argument(help="JSON lines (or .xz) of questions, prompts or conversations.")],
    draft: Annotated[
        list[str],
        typer.Option("--draft", "-d", help="A draft's folder, 'auto' (the one that ships) or 'ngram'. Repeatable."),
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
    copied_tokens: Annotated[
        int, typer.Option(min=0, help="Each draft also with so many nodes copied from the text beside its own (CPU).")
    ] = 0,
    by_length: Annotated[
        bool, typer.Option("--by-length", help="Tokens a pass by the length of the prompt, too.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts answered together, at most.")] = 8,
    max_context: options.MaxContext = None,
    kernels: options.Kernels = "auto",
) -> None:
    """Compare drafts: tokens a pass, by position, with and without looping answers; speed; and is the text the same?

    The first draft is the one the others are held against. Prompts are answered
    in groups, each way of decoding in turn; intervals cover 95%.

    Examples:
      slipstream eval drafts questions.jsonl -d draft -d draft-fp8 --count 200

      slipstream eval drafts p.jsonl -d auto -d ngram --depths 3,6 --as-served

      slipstream eval drafts p.jsonl -d auto -d ngram --copied-tokens 24
    """
    from slipstream.engine.config import EngineConfig
    from slipstream.engine.loading import LoadOptions, load
    from slipstream.speculation.sampling import SamplingParams
    from slipstream.train.data.prompts import read_prompts
    from slipstream.train.draft.compare import NGRAM, compare_drafts

    console = Console(markup=False)  # a draft's folder may be called [bold]
    asked = read_prompts(prompts)[:count]
    at_once = min(concurrency, max(1, len(asked) // _FEWEST_GROUPS))
    engine = EngineConfig(borrowed_tokens=borrowed_tokens, copied_tokens=copied_tokens)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    shapes = [options.tree_shape(depth, width, budget) for depth in _depths(depths)]
    chosen = options.kernel_choice(kernels)
    options.fetch_if_embedded(model, Console(stderr=True))
    with Phases(Console(stderr=True)) as phases:
        phases.start("loading")
        wanted = LoadOptions(
            model, "none", kernels=chosen, max_context=max_context, max_requests=at_once, engine=engine
        )
        loaded = load(wanted)
        arms = len(draft) + sum(name != NGRAM for name in draft) * (copied_tokens > 0)
        phase = phases.start("answers", len(asked) * (1 + arms * len(shapes)), "answers")
        results = compare_drafts(loaded, draft, shapes, asked, params, as_served, phase.advance)
    together = "one at a time" if at_once == 1 else f"{at_once} together"
    shape = f", {shapes[0]}" if len(shapes) == 1 else ""
    title = f"{len(asked)} prompt{'' if len(asked) == 1 else 's'}, {together}{shape}"
    console.print(_speeds(results, title, several=len(shapes) > 1))
    console.print(_answers(results, several=len(shapes) > 1))
    if by_length:
        console.print(_lengths(results, several=len(shapes) > 1))
    if any(result.num_identical != result.num_answers for result in results):
        raise typer.Exit(1)


def _depths(text: str) -> list[int]:
    try:
        return [int(depth) for depth in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--depths {text}: numbers with commas between them, as in 3,6.") from None


def _speeds(results: "list[DraftResult]", title: str, several: bool) -> Table:
    """One row for each way of decoding: what it weighs, and what it is worth; `several` shapes have a column."""
    from slipstream.records.compare import speedup

    headings = (
        "draft",
        *(("tree",) if several else ()),
        "MB",
        "tokens\na pass",
        "95%",
        "tokens/s",
        "95%",
        "speed-up",
        "95%",
    )
    table = narrow_table(title, headings, folding=("draft", "tree"))
    plain = dict(enumerate(results[0].speeds))
    for result in results:
        speed = speedup(dict(enumerate(result.speeds)), dict.fromkeys(plain, 1.0))
        ratio = speedup(dict(enumerate(result.speeds)), plain)
        assert speed is not None and ratio is not None, "there is at least one group"
        drafted = result.shape is not None
        table.add_row(
            Path(result.name).name,
            *((_shape(result),) if several else ()),
            f"{result.nbytes / 1e6:.1f}" if result.nbytes else "-",
            f"{result.stats.acceptance_length:.3f}",
            _acceptance_interval(result) if drafted else "-",
            f"{speed.ratio:.1f}",
            _interval(speed, 0),
            f"{ratio.ratio:.2f}x" if drafted else "-",
            _interval(ratio, 2) if drafted else "-",
        )
    return table


def _acceptance_interval(result: "DraftResult") -> str:
    """Show the interval of tokens a pass over other prompts of the kind: that of a ratio of sums."""
    from slipstream.records.compare import mean_interval

    length, answers = result.stats.acceptance_length, result.by_answer
    passes = result.stats.decoding_passes / len(answers)
    if len(answers) < 2 or not passes:
        return "-"
    off = [(own.acceptance_length - length) * own.decoding_passes / passes for own in answers]
    low, high = mean_interval(off)
    return f"{length + low:.2f}-{length + high:.2f}"


def _answers(results: "list[DraftResult]", several: bool) -> Table:
    """One row a draft: where its guesses were kept, what loops do to the figure, and whether any answer changed."""
    headings = (
        "draft",
        *(("tree",) if several else ()),
        "accepted by position",
        "vs\nfirst",
        "without\nloops",
        "looping",
        "identical",
    )
    table = narrow_table("the answers", headings, folding=("draft", "tree", "accepted by position"))
    drafted = [result for result in results if result.shape is not None]
    first = drafted[0].stats.acceptance_length
    for result in drafted:
        table.add_row(
            Path(result.name).name,
            *((_shape(result),) if several else ()),
            " ".join(f"{rate:.0%}" for rate in result.stats.rates[: result.shape.depth if result.shape else 0]),
            f"{result.stats.acceptance_length / first - 1:+.1%}",
            f"{result.straight.acceptance_length:.3f}",
            f"{result.num_looping / result.num_answers:.0%}",
            f"{result.num_identical} of {result.num_answers}",
        )
    return table


def _lengths(results: "list[DraftResult]", several: bool) -> Table:
    """One row a draft: tokens a pass for each bucket of prompt lengths, and how many passes that is from."""
    drafted = [result for result in results if result.shape is not None]
    names = sorted({name for result in drafted for name in result.by_length}, key=_first_number)
    table = narrow_table(
        "by the prompt's length in tokens", ("draft", *(("tree",) if several else ()), *names), ("draft",)
    )
    for result in drafted:
        found = [result.by_length.get(name) for name in names]
        table.add_row(
            Path(result.name).name,
            *((_shape(result),) if several else ()),
            *(
                f"{stats.acceptance_length:.3f} ({stats.passes - stats.prompt_passes})" if stats else "-"
                for stats in found
            ),
        )
    return table


def _first_number(name: str) -> int:
    """Order buckets by where they begin."""
    return 0 if name.startswith("below") else int(name.split()[0])


def _shape(result: "DraftResult") -> str:
    return "-" if result.shape is None else str(result.shape)


def _interval(speed: "Speedup", digits: int) -> str:
    """Show an interval; one group alone has none."""
    return "-" if speed.num_pairs < 2 else f"{speed.low:.{digits}f}-{speed.high:.{digits}f}"
