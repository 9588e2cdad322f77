"""`slipstream train`: an EAGLE-3 draft for a target, from data the target writes itself."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.cli import options
from slipstream.cli.train_display import Display, bars, results_table

if TYPE_CHECKING:
    import torch

    from slipstream.checkpoint.config import DraftDialect
    from slipstream.train.draft.server_states import Remote
    from slipstream.train.run.output import RunRecord
    from slipstream.train.run.phases import TrainingRun
    from slipstream.train.run.plan import Plan
    from slipstream.train.run.recipe import Recipe
    from slipstream.train.run.trainer import TrainState

_DIALECTS: tuple["DraftDialect", ...] = ("sglang", "vllm", "speculators")
_BUDGET_S = 3600.0


def train(
    out: Annotated[Path, typer.Option(help="Folder to write the draft to.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET | URL...]",
            help="Target: a folder, a .gguf file, a hub id, or 'embedded'; or addresses of servers that run it.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With servers: the target's checkpoint here; by default what they name.")
    ] = None,
    server_states: Annotated[
        bool,
        typer.Option(
            "--server-states",
            help="Have the servers (vLLM) compute the target's states too; only its table and head are loaded here.",
        ),
    ] = False,
    recipe: Annotated[Path | None, typer.Option(help="A YAML recipe; recipes/train has the shipped draft's.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the prompt files that the recipe names.")] = Path(),
    work: Annotated[Path | None, typer.Option(help="Folder of corpus and state; OUT-work by default.")] = None,
    init_from: Annotated[Path | None, typer.Option(help="A draft folder to train on, instead of a new draft.")] = None,
    average_with: Annotated[Path | None, typer.Option(help="A draft folder to average the trained one with.")] = None,
    average_share: Annotated[
        float, typer.Option(min=0, max=1, help="With --average-with: the trained draft's share of the average.")
    ] = 0.5,
    dialect: Annotated[str, typer.Option(help="Who shall read it: sglang, vllm or speculators.")] = "sglang",
    offline: Annotated[
        Path | None, typer.Option(help="Folder to store the target's states in, once, and train from; large.")
    ] = None,
    time_budget_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for everything: loading, data, training, measuring. Without a recipe 3600."),
    ] = None,
    generate_s: Annotated[float | None, typer.Option(min=0, help="Stop writing data after this many seconds.")] = None,
    stop_after_s: Annotated[
        float | None, typer.Option(min=0, help="Leave off training after this many seconds; the same command goes on.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe. Repeatable.")
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Split the target over so many devices of this machine; the draft stays whole.")
    ] = 1,
    device: options.Device = "auto",
) -> None:
    """Train an EAGLE-3 draft: the target writes the data, the draft learns to guess it, and is measured.

    Run the same command again to take up a run that was stopped: data, steps and curves continue where they were.
    Under torchrun, several GPUs share each step.

    Examples:
      slipstream train embedded --out draft --time-budget-s 600

      slipstream train path/to/target --out draft --time-budget-s 3600

      slipstream train embedded --recipe recipes/train/embedded.yaml --data prompts --out draft

      slipstream train http://a:8000 http://b:8000 --out draft --server-states

      slipstream train embedded --recipe mine.yaml --set train.lr=6e-4 --init-from draft --out draft-2
    """
    from slipstream.train.draft.capture import CaptureHooks
    from slipstream.train.run.output import Lineage
    from slipstream.train.run.phases import Output, Paths, TrainingRun
    from slipstream.train.run.plan import read_plan
    from slipstream.train.run.trial import PROMPT_SETS
    from slipstream.train.run.world import local_device

    begun = time.monotonic()
    place = local_device(device)
    output = Output(out, _dialect(dialect), Lineage.read(init_from, average_with, average_share))
    model, remote = _target(models or ["embedded"], target, server_states, tp)
    options.fetch_if_embedded(model, Console(stderr=True))
    budget_s = time_budget_s if recipe is not None or time_budget_s is not None else _BUDGET_S
    paths = Paths(PROMPT_SETS if recipe is None else data, work or out.with_name(f"{out.name}-work"))
    known = None if budget_s is None else read_plan(paths.work)
    settings = (
        known.recipe
        if known
        else _recipe(recipe, changes or [], model, place, (budget_s or _BUDGET_S, tp, not server_states))
    )
    run = TrainingRun(model, settings, paths, place, tp, remote)
    console = Console(quiet=run.world.rank > 0, markup=False)
    console.print(f"target {model}, {run.speaker.model.spec.num_layers} layers, on {place}; work in {run.paths.work}")
    with _stoppable(console, run.paths.work), bars(console) as shown:
        display = Display(shown)
        if budget_s is not None:
            plan = _plan(run, budget_s, begun, [str(recipe), *(changes or [])], display)
            offline = offline or (run.paths.work / "features" if plan.store else None)
        if server_states:
            offline = offline or run.paths.work / "features"
        display.expect(run.recipe)
        corpus = run.generate(display.data, generate_s, offline)
        draft, vocab = run.start(corpus, init_from)
        console.print(
            f"data: {len(corpus):,} texts, {corpus.num_answer_tokens:,} answer tokens; "
            f"the draft's {len(vocab.token_ids_V):,} tokens cover {vocab.coverage:.2%} of them"
        )
        with display.waiting("answering held-out questions"):
            run.eval_sets()
            if init_from is not None:
                run.measure_start(draft, vocab)
        store = None
        if offline is not None:
            hooks = CaptureHooks(display.cost, display.features)
            store = run.store_features(draft, vocab, corpus, offline, hooks)
        state = run.train(draft, vocab, corpus, display.step, stop_after_s, store, output.lineage.started_from)
        if average_with is not None:
            run.average(draft, average_with, average_share)
        if run.world.rank == 0:
            with display.waiting("measuring and writing"):
                record = run.write(output, draft, vocab, state)
    if run.world.rank == 0:
        _finish(console, record, state, output.folder)
    run.close()


def _target(models: list[str], named: str | None, states: bool, tp: int) -> "tuple[str, Remote]":
    """Return the target's checkpoint, and the servers that were named instead of it."""
    from slipstream.errors import ConfigError
    from slipstream.train.data.servers import Servers
    from slipstream.train.draft.server_states import Remote

    urls = [model for model in models if model.startswith(("http://", "https://"))]
    if not urls:
        if len(models) > 1:
            raise ConfigError(f"{' '.join(models)}: name one target, or addresses of servers that run it.")
        if states or named is not None:
            raise ConfigError("--server-states and --target go with addresses of servers (http://...).")
        return models[0], Remote()
    if len(urls) < len(models):
        raise ConfigError("Name servers only (http://...); their target's checkpoint is given with --target.")
    if states and tp > 1:
        raise ConfigError("--server-states leaves the target's blocks to the servers; --tp would split nothing.")
    servers = Servers(urls)
    return named or servers.target, Remote(servers, states)


def _recipe(
    path: Path | None, changes: list[str], model: str, device: "torch.device", means: tuple[float, int, bool]
) -> "Recipe":
    from slipstream.checkpoint.config import model_spec
    from slipstream.checkpoint.reader import open_checkpoint
    from slipstream.train.run.recipe import change_recipe, read_recipe
    from slipstream.train.run.trial import plain_recipe

    if path is not None:
        return change_recipe(read_recipe(path), changes)
    source = open_checkpoint(model)
    recipe = plain_recipe(model_spec(source.config, source.folder), device, *means)
    return change_recipe(recipe, changes)


def _plan(run: "TrainingRun", budget_s: float, begun: float, settings: list[str], display: Display) -> "Plan":
    """Make the plan, or read the one a run that was stopped had, and print it."""
    from slipstream.train.run.trial import Trial, settle_plan

    asked = {"target": run.digest, "budget_s": budget_s, "settings": settings, "device": run.device.type}
    with display.waiting("trying a few texts and steps"):
        plan = settle_plan(run, Trial(asked, begun))
    for line in plan.lines():
        display.print(line)
    return plan


@contextmanager
def _stoppable(console: Console, work: Path) -> Iterator[None]:
    """Take SIGTERM for Ctrl-C; either way say what was kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"Stopped. What was made is in {work}; the same command goes on from there.")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _dialect(name: str) -> "DraftDialect":
    for dialect in _DIALECTS:
        if name == dialect:
            return dialect
    raise typer.BadParameter(f"--dialect {name}: it is {', '.join(_DIALECTS)}.")


def _finish(console: Console, record: "RunRecord", state: "TrainState", folder: Path) -> None:
    """Draw the curves and show the results."""
    from slipstream.train.run.output import draw_curves

    draw_curves(state.history, folder / "curves.png")
    title = f"acceptance length, greedy chains (step {state.step} of {state.total_steps})"
    console.print(results_table(title, record.results, record.before))
    for name, result in record.results.items():
        if len(result["by_length"]) > 1:
            lengths = "; ".join(f"{length}: {walks['3']:.2f}" for length, walks in result["by_length"].items())
            console.print(f"{name}, by prompt length, 3 drafted: {lengths}")
    console.print(f"draft written to {folder} (weights, config.json, slipstream.json, README.md, curves.png)")
    if not state.finished:
        console.print("The run is not finished; the same command goes on from here.")
