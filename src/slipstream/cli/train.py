"""`slipstream train`: an EAGLE-3 draft for a target, from data the target writes itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.cli import options

if TYPE_CHECKING:
    import torch

    from slipstream.checkpoint.config import DraftDialect
    from slipstream.train.capture import DiskCost
    from slipstream.train.conversations import Tally
    from slipstream.train.generate import GenerationStats
    from slipstream.train.output import RunRecord
    from slipstream.train.recipe import Recipe
    from slipstream.train.state import TrainState
    from slipstream.train.trainer import Progress as Step

_DIALECTS: tuple["DraftDialect", ...] = ("sglang", "vllm", "speculators")


def train(
    out: Annotated[Path, typer.Option(help="Folder to write the draft to.")],
    model: Annotated[str, typer.Argument(help="Target: a folder, a .gguf file, a hub id, or 'embedded'.")] = "embedded",
    recipe: Annotated[Path | None, typer.Option(help="A YAML recipe; recipes/train has the shipped draft's.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the prompt files that the recipe names.")] = Path(),
    work: Annotated[Path | None, typer.Option(help="Folder of corpus and state; OUT-work by default.")] = None,
    init_from: Annotated[Path | None, typer.Option(help="A draft folder to train on, instead of a new draft.")] = None,
    average_with: Annotated[Path | None, typer.Option(help="A draft folder to average the trained one with.")] = None,
    dialect: Annotated[str, typer.Option(help="Who shall read it: sglang, vllm or speculators.")] = "sglang",
    offline: Annotated[
        Path | None, typer.Option(help="Folder to store the target's states in, once, and train from; large.")
    ] = None,
    time_budget_s: Annotated[
        float | None, typer.Option(min=0, help="Plan as many training steps as fit this many seconds.")
    ] = None,
    generate_s: Annotated[float | None, typer.Option(min=0, help="Stop writing data after this many seconds.")] = None,
    stop_after_s: Annotated[
        float | None, typer.Option(min=0, help="Leave off training after this many seconds; the same command goes on.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe. Repeatable.")
    ] = None,
    device: options.Device = "auto",
) -> None:
    """Train an EAGLE-3 draft: the target writes the data, the draft learns to guess it, and is measured.

    Run the same command again to take up a run that was stopped: data, steps and curves continue where they were.
    Under torchrun, several GPUs share each step.

    Examples:
      slipstream train path/to/target --out draft --time-budget-s 3600

      slipstream train embedded --recipe recipes/train/embedded.yaml --data prompts --out draft

      slipstream train embedded --recipe mine.yaml --set train.lr=6e-4 --init-from draft --out draft-2
    """
    from slipstream.train.capture import CaptureHooks
    from slipstream.train.lineage import Lineage
    from slipstream.train.run import Output, Paths, TrainingRun
    from slipstream.train.world import local_device

    place = local_device(device)
    settings = _recipe(recipe, changes or [], time_budget_s, place)
    output = Output(out, _dialect(dialect), Lineage.read(init_from, average_with))
    if model == "embedded":
        options.fetch_embedded(Console(stderr=True))
    run = TrainingRun(model, settings, Paths(data, work or out.with_name(f"{out.name}-work")), place)
    console = Console(quiet=run.world.rank > 0, markup=False)
    console.print(f"target {model}, {run.speaker.model.spec.num_layers} layers, on {place}; work in {run.paths.work}")
    with _bars(console) as bars:
        display = _Display(bars, settings)
        corpus = run.generate(display.data, generate_s)
        draft, vocab = run.start(corpus, init_from)
        console.print(
            f"data: {len(corpus):,} texts, {corpus.num_answer_tokens:,} answer tokens; "
            f"the draft's {len(vocab.token_ids_V):,} tokens cover {vocab.coverage:.2%} of them"
        )
        store = None
        if offline is not None:
            hooks = CaptureHooks(display.cost, display.features)
            store = run.store_features(draft, vocab, corpus, offline, hooks)
        state = run.train(draft, vocab, corpus, display.step, stop_after_s, store)
    if average_with is not None:
        run.average(draft, average_with)
    if run.world.rank == 0:
        _finish(console, run.write(output, draft, vocab, state), state, output.folder)
    run.world.leave()


def _recipe(path: Path | None, changes: list[str], time_budget_s: float | None, device: "torch.device") -> "Recipe":
    from slipstream.train.recipe import change_recipe, make_recipe, read_recipe

    if path is None:
        # Without files every user turn is the target's own; a CPU gains nothing from a batch of thousands.
        content: dict[str, dict[str, float]] = {"data": {"magpie": 1.0, "maths": 0.0}, "train": {"time_budget_s": 3600}}
        if device.type == "cpu":
            content["generate"] = {"rows": 32}
        recipe = make_recipe(content, "the plain recipe")
    else:
        recipe = read_recipe(path)
    budget = [] if time_budget_s is None else [f"train.time_budget_s={time_budget_s}"]
    return change_recipe(recipe, [*changes, *budget])


def _dialect(name: str) -> "DraftDialect":
    for dialect in _DIALECTS:
        if name == dialect:
            return dialect
    raise typer.BadParameter(f"--dialect {name}: it is {', '.join(_DIALECTS)}.")


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s, {task.fields[left]}"), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip


class _Display:
    """Shows the long phases: a bar each, and a line for every report of the training."""

    def __init__(self, bars: Progress, recipe: "Recipe") -> None:
        self._bars, self._recipe = bars, recipe
        self._data: TaskID | None = None
        self._features: TaskID | None = None
        self._steps: TaskID | None = None

    def data(self, tally: "Tally", stats: "GenerationStats") -> None:
        """Show how far the data is."""
        total = self._recipe.data.answer_tokens
        if self._data is None:
            self._data = self._bars.add_task("data", total=total, speed=0.0, left="")
        left = (total - tally.answer_tokens) * stats.seconds / max(1, tally.answer_tokens)
        self._bars.update(
            self._data, completed=tally.answer_tokens, speed=stats.tokens_per_s, left=_left(left),
            description=f"data: {tally.kept:,} texts",
        )  # fmt: skip

    def cost(self, cost: "DiskCost") -> None:
        """Show what storing the target's states takes, before anything is written."""
        self._bars.console.print(f"offline: {cost}", highlight=False)
        self._features = self._bars.add_task("features", total=cost.manifest.num_tokens, speed=0.0, left="")

    def features(self, tokens: int) -> None:
        """Show how far storing is."""
        if self._features is not None:
            speed = self._bars.tasks[self._features].speed or 0.0
            self._bars.update(self._features, completed=tokens, speed=speed)

    def step(self, step: "Step") -> None:
        """Show how far the training is, and what it has reached."""
        if self._steps is None:
            self._steps = self._bars.add_task("training", total=step.total_steps, speed=0.0, left="")
        self._bars.update(
            self._steps, completed=step.step, speed=step.tokens_per_s, left=_left(step.seconds_left),
            description=f"training: loss {step.loss:.3f}",
        )  # fmt: skip
        accuracy = " ".join(f"{value:.1%}" for value in step.accuracy)
        reached = "".join(f"  {name} {value:.2f}" for name, value in step.acceptance.items())
        line = f"step {step.step}/{step.total_steps}  loss {step.loss:.4f}  accuracy {accuracy}  lr {step.lr:.1e}"
        self._bars.console.print(line + reached, highlight=False)


def _left(seconds: float) -> str:
    return f"{max(0, round(seconds)) // 60}:{max(0, round(seconds)) % 60:02d} left"


def _finish(console: Console, record: "RunRecord", state: "TrainState", folder: Path) -> None:
    """Draw the curves and show the results."""
    from slipstream.train.curves import draw_curves

    draw_curves(state.history, folder / "curves.png")
    table = Table(title=f"acceptance length, greedy chains (step {state.step} of {state.total_steps})")
    for heading in ("prompts", "texts", "looping", "drafted", "tokens a pass", "without loops", "by position"):
        table.add_column(heading, justify="left" if heading in ("prompts", "by position") else "right")
    for name, result in record.results.items():
        for chain, entry in result["chains"].items():
            table.add_row(
                name, str(result["texts"]), f"{result['loop_share']:.1%}", chain, f"{entry['acceptance_length']:.2f}",
                f"{entry['acceptance_length_without_loops']:.2f}", " ".join(f"{rate:.0%}" for rate in entry["rates"]),
            )  # fmt: skip
    console.print(table)
    console.print(f"draft written to {folder} (weights, config.json, slipstream.json, README.md, curves.png)")
    if not state.finished:
        console.print("The run is not finished; the same command goes on from here.")
