"""`slipstream bench`: plan, run, check and import comparisons of servers and drafts."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.cli.bench_import import import_
from slipstream.cli.bench_like import like
from slipstream.cli.bench_rank import rank

if TYPE_CHECKING:
    from rich.progress import Progress

    from slipstream.bench.estimate import TimeLeft
    from slipstream.bench.plan import Plan, Point
    from slipstream.launch.command import Launch
    from slipstream.records.point import PointKey, PointRecord

app = typer.Typer(
    no_args_is_help=True,
    help="Measure servers against each other: recipes in, records out.\n\n"
    "Example:\n  slipstream bench run recipes/bench/embedded.yaml",
)
app.command()(rank)
app.command()(like)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML).")]
Arms = Annotated[list[str] | None, typer.Option("--arm", help="Only this arm; may be given again.")]
Workloads = Annotated[list[str] | None, typer.Option("--workload", help="Only this workload; may be given again.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, e.g. drafts.fp8.path=/data/fp8.")
]


@app.command()
def plan(
    recipe: RecipePath,
    arm: Arms = None,
    workload: Workloads = None,
    override: Overrides = None,
    form: Annotated[Literal["text", "json"], typer.Option("--format", help="For a person or for a program.")] = "text",
) -> None:
    """Print every point with the exact command and environment of its server; start nothing.

    Example:
      slipstream bench plan recipes/bench/embedded.yaml --arm eagle3-bf16
    """
    from slipstream.bench.plan_text import plan_rows, plan_text

    made = _plan(recipe, arm, workload, override)
    print(json.dumps(plan_rows(made), indent=1) if form == "json" else plan_text(made), end="")


@app.command()
def validate(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="Recipes to check.")],
    override: Overrides = None,
) -> None:
    """Check recipes and say what is wrong with them.

    Example:
      slipstream bench validate recipes/bench/embedded.yaml
    """
    from slipstream.bench.plan import build_plan
    from slipstream.bench.recipe_file import RecipeError, load_recipe

    broken = 0
    for path in recipes:
        try:
            made = build_plan(load_recipe(path, override or ()))
        except RecipeError as error:
            broken += 1
            print(f"{path}: not valid\n{error}")
            continue
        print(f"{path}: valid, {sum(1 for _ in made.points())} points")
        for note in made.notes:
            print(f"  note: {note}")
    if broken:
        raise typer.Exit(1)


@app.command()
def run(
    recipe: RecipePath,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records and logs.", show_default="out/bench/NAME")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Measure the server that already runs here (with one --arm).")] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="GSM8K's folder, for recipes with evals.gsm8k.")] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Measure the other arms where one arm's server cannot be started.")
    ] = False,
    images: Annotated[
        Literal["docker", "podman", "inside"] | None,
        typer.Option(help="Start servers in the recipe's images, or say that this runs inside the only one."),
    ] = None,
    arm: Arms = None,
    workload: Workloads = None,
    override: Overrides = None,
) -> None:
    """Measure every point that has no valid record yet; run it again to fill in what is missing.

    Example:
      slipstream bench run recipes/bench/embedded.yaml --out out/bench/embedded
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from slipstream.bench.evals.gsm8k import WHERE_IT_IS
    from slipstream.bench.sweep import RunOptions, run_plan

    made = _plan(recipe, arm, workload, override)
    folder = out or Path("out/bench") / made.loaded.recipe.name
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name, why in made.skipped_arms.items():
        console.print(f"arm {name} is left out: {why}", style="yellow", highlight=False, markup=False)
    for note in made.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    if made.loaded.recipe.evals.gsm8k and gsm8k is None:
        print(f"not evaluated, though the recipe asks GSM8K: give its folder with --gsm8k ({WHERE_IT_IS}).")
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,  # a log has the lines
    ) as progress:
        summary = asyncio.run(run_plan(made, RunOptions(folder, url, gsm8k, keep_going, images), _Screen(progress)))
    print(
        f"{summary.measured} points measured, {summary.invalid} of them invalid; {summary.skipped} were already there."
    )
    if summary.stopped:
        print(f"stopped: {summary.stopped}\nMend it and run the same command again, or measure the rest: --keep-going.")
    for failure in summary.failed_evals:
        print(f"not evaluated: {failure}")
    print(f"records: {folder}\nnext: slipstream report {folder}")
    if summary.invalid or summary.failed_evals or summary.stopped:
        raise typer.Exit(1)


@app.command()
def peer(
    name: Annotated[Literal["vllm"], typer.Argument(help="The program to measure beside.")],
) -> None:
    """Install another server in an environment of its own, and print the options that point a recipe at it.

    Example:
      slipstream bench peer vllm

    With its output: bench run recipes/bench/embedded-vllm.yaml $(slipstream bench peer vllm)
    """
    from slipstream.cli.peers import vllm_settings

    settings = {"vllm": vllm_settings}[name]()
    print(" ".join(f"--set {key}={value}" for key, value in settings.items()))


app.command("import")(import_)


def _plan(recipe: Path, arm: list[str] | None, workload: list[str] | None, override: list[str] | None) -> "Plan":
    from slipstream.bench.plan import build_plan
    from slipstream.bench.recipe_file import load_recipe

    return build_plan(load_recipe(recipe, override or ()), arm or (), workload or ())


class _Screen:
    """Shows a sweep as one bar of points, with a line for every finished point."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._points = progress.add_task("points", total=None)
        self._requests = progress.add_task("requests", total=None)
        self._left: TimeLeft | None = None
        self._began = time.monotonic()

    def sweep_started(self, points: "Sequence[Point]") -> None:
        """Say how much there is to do; how long it takes shows once a point was measured."""
        from slipstream.bench.estimate import TimeLeft

        self._left = TimeLeft(points)
        if points:
            answers = sum(point.load.num_requests for point in points)
            size = f"{len(points)} points, {answers} answers, {self._left.num_tokens:,} tokens"
            self._print("", f"{size}; the time left is estimated from the first point on")

    def point_started(self, point: "Point", number: int, total: int) -> None:
        """Show which point runs."""
        key = point.key
        self._progress.update(self._points, total=total, completed=number - 1)
        words = f"{key.arm} {key.topology} {key.workload} c{key.concurrency} s{key.seed}"
        self._progress.reset(self._requests, total=point.load.num_requests, description=words)

    def request_done(self) -> None:
        """Move the bar of requests."""
        self._progress.advance(self._requests)

    def point_finished(self, record: "PointRecord") -> None:
        """Print the point's main figures, or why it is invalid."""
        key = record.key
        name = f"{key.arm} {key.topology} {key.workload} c{key.concurrency} s{key.seed}"
        self._progress.update(self._points, advance=1, description=self._points_left(key))
        if record.throughput is None or record.latency is None:
            self._print("[red]invalid[/red] ", f"{name}: {'; '.join(record.reasons)}")
            return
        tpot = f", TPOT {record.latency.tpot_ms.median:.1f} ms" if record.latency.tpot_ms else ""
        length = f", acceptance length {record.acceptance.length:.2f}" if record.acceptance else ""
        self._print("", f"{name}: {record.throughput.output_tok_s:.1f} tok/s{tpot}{length}")
        for warning in record.warnings:
            self._print("  [yellow]warning[/yellow]: ", warning)

    def _points_left(self, key: "PointKey") -> str:
        """Describe the bar of points, after one of them."""
        from slipstream.bench.estimate import in_words

        now = time.monotonic()
        assert self._left is not None, "a sweep says what it will measure"
        self._left.measured(key, now - self._began)
        self._began = now
        left = self._left.seconds()
        return f"points, about {in_words(left)} left" if left else "points"

    def server_starting(self, launch: "Launch", log_file: Path) -> None:
        """Say which server starts and where its log is."""
        self._print("", f"starting {launch.server} on port {launch.port} (log: {log_file})")

    def _print(self, markup: str, text: str) -> None:
        self._progress.console.print(markup, end="", highlight=False)
        self._progress.console.print(text, markup=False, highlight=False)
