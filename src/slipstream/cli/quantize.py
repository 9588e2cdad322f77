"""The verb `slipstream quantize`: a checkpoint folder in, a quantized one out, and what it cost in accuracy."""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

if TYPE_CHECKING:
    from slipstream.quant.quantize import QuantizeResult

_MOST_LAYERS = 24
_SCHEMES = "ptpc_fp8, fp8, int4, w8a8_int8, w4a8, int4_fp8, mxfp4 or mxfp4_weight_only"


def quantize(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder: a target or a draft.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    scheme: Annotated[str, typer.Option("--scheme", help=f"One of {_SCHEMES}.")],
    exact: Annotated[
        str | None, typer.Option("--exact", help="'quark': repeat Quark 0.13 bit for bit, instead of rounding better.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Layer to keep: a name, a glob or re:EXPRESSION. Repeatable.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Layer to quantize though others keep it. Repeatable.")
    ] = None,
    group_size: Annotated[int | None, typer.Option("--group-size", help="Columns that share a scale (int4).")] = None,
    dialect: Annotated[str, typer.Option("--dialect", help="quark or compressed-tensors.")] = "quark",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if slipstream wrote it.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Measure errors over every row, and chart them.")] = False,
) -> None:
    """Quantize a checkpoint file to file, with bounded memory; run it again to take up a stopped run."""
    from slipstream.errors import ConfigError
    from slipstream.quant.plan import QuantizeOptions, plan_quantize
    from slipstream.quant.quantize import quantize as run
    from slipstream.quant.scheme import scheme_named

    if exact not in (None, "quark"):
        raise ConfigError(f"--exact takes 'quark', not {exact!r}.")
    options = QuantizeOptions(
        scheme_named(scheme, group_size),
        rounding="quark" if exact else "best",
        dialect=dialect,  # type: ignore[arg-type]  # checked by QuantizeOptions
        exclude=tuple(exclude or ()),
        include=tuple(include or ()),
        full_report=report,
    )
    _keep_freed_memory()
    console = Console()
    plan = plan_quantize(source, options)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{source.name} to {scheme}", total=plan.source_bytes)
        result = run(plan, out, overwrite, lambda nbytes: progress.advance(task, nbytes))
    _print_result(console, result, options.rounding, chart=report)


def _print_result(console: Console, result: "QuantizeResult", rounding: str, chart: bool) -> None:
    console.print(_error_table(result, rounding, chart))
    dtypes = Table("", "dtype", "tensors", "MB", title=str(result.folder))
    for side, counts in (("before", result.before), ("after", result.after)):
        for i, count in enumerate(counts):
            dtypes.add_row(side if i == 0 else "", count.dtype, str(count.tensors), f"{count.nbytes / 1e6:.2f}")
        dtypes.add_row("", "", "", f"{sum(count.nbytes for count in counts) / 1e6:.2f}", end_section=True)
    console.print(dtypes)
    if result.resumed_shards:
        console.print(f"{result.resumed_shards} files were already there from a run that was stopped.")


def _error_table(result: "QuantizeResult", rounding: str, chart: bool) -> Table:
    """Show both roundings' errors: every layer with --report, else the worst."""
    shown = result.layers
    if not chart and len(shown) > _MOST_LAYERS:
        shown = tuple(sorted(shown, key=lambda layer: -layer.errors.relative_best)[:_MOST_LAYERS])
    rows, measured = sum(layer.rows for layer in result.layers), sum(layer.errors.rows for layer in result.layers)
    table = Table(
        title="relative mean squared error by layer",
        caption=f"{len(shown)} of {len(result.layers)} layers, measured over {measured} of {rows} rows; "
        f"rounding written: {rounding}",
    )
    table.add_column("layer", no_wrap=True, overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("best", justify="right", no_wrap=True)
    table.add_column("quark", justify="right", no_wrap=True)
    if chart:
        table.add_column("# best + quark", no_wrap=True)
    worst = max(layer.errors.relative_quark for layer in result.layers) or 1.0
    for layer in shown:
        best, quark = layer.errors.relative_best, layer.errors.relative_quark
        cells = [layer.module, f"{layer.rows} x {layer.columns}", f"{best:.2e}", f"{quark:.2e}"]
        table.add_row(*cells, *([_bar(min(best, quark), max(best, quark), worst)] if chart else []))
    return table


def _bar(low: float, high: float, full: float, width: int = 16) -> str:
    short, long = round(width * low / full), round(width * high / full)
    return "#" * short + "+" * (long - short)


def _keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next block: page faults cost this verb more than its arithmetic."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold, keep_bytes = -1, -3, 1 << 28
        mallopt(trim_threshold, keep_bytes)
        mallopt(mmap_threshold, keep_bytes)
