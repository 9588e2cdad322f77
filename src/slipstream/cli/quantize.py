"""The verb `slipstream quantize`: a checkpoint folder in, a quantized one out, and what it cost in accuracy."""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli.progress import Phases
from slipstream.cli.tables import narrow_table

if TYPE_CHECKING:
    from slipstream.quant.left_alone import LeftAlone
    from slipstream.quant.quantize import QuantizeResult

_MOST_LAYERS = 24
_MOST_KINDS = 4
_SCHEMES = "ptpc_fp8, fp8, int4, w8a8_int8, w4a8, int4_fp8, mxfp4 or mxfp4_weight_only"


def quantize(
    source: Annotated[str, typer.Argument(help="A target or a draft: a folder, a hub id, or 'embedded' (the model).")],
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
    """Quantize a checkpoint file to file, with bounded memory; run it again to take up a stopped run.

    Examples:
      slipstream quantize path/to/draft --scheme ptpc_fp8 --out draft-fp8

      slipstream quantize embedded --scheme int4 --exclude "*.mlp.*" --out int4

    The flags of Quark's quantize_quark.py work, too: --model_dir, --quant_scheme, --exclude_layers, --output_dir.
    """
    from slipstream.checkpoint.embedded_folder import embedded_folder
    from slipstream.checkpoint.hub import is_embedded, resolve
    from slipstream.errors import ConfigError
    from slipstream.quant.left_alone import left_alone
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
    console = Console(markup=False)  # folders and layers may be called [bold]
    # The embedded model stands here for any target; as it ships its weights are quantized already.
    found = embedded_folder() if is_embedded(source) else resolve(source)
    if found.suffix == ".gguf":
        raise ConfigError(f"{found}: the weights of a .gguf file are quantized already; start from a folder.")
    plan = plan_quantize(found, options)
    for pattern in plan.selection.moot:
        console.print(f"--exclude {pattern}: embeddings and norms are never quantized; nothing to do.")
    with Phases(Console(stderr=True)) as phases:
        phase = phases.start(f"{Path(source).name} to {scheme}", plan.source_bytes, "MB", per=1e6)
        result = run(plan, out, overwrite, phase.advance)
    _print_result(console, result, options.rounding, chart=report)
    console.print(_left_alone_table(left_alone(plan), len(plan.selection.quantized)))


def _print_result(console: Console, result: "QuantizeResult", rounding: str, chart: bool) -> None:
    console.print(_error_table(result, rounding, chart))
    table = narrow_table(str(result.folder), ("", "dtype", "tensors", "MB"), folding=("", "dtype"))
    for side, counts in (("before", result.before), ("after", result.after)):
        for count in counts:
            table.add_row(side, count.dtype, str(count.tensors), f"{count.nbytes / 1e6:.2f}")
        total = sum(count.tensors for count in counts), sum(count.nbytes for count in counts) / 1e6
        table.add_row(side, "all", str(total[0]), f"{total[1]:.2f}", style="bold", end_section=True)
    console.print(table)
    if result.resumed_shards:
        console.print(f"{result.resumed_shards} files were already there from a run that was stopped.")


def _left_alone_table(groups: "list[LeftAlone]", num_quantized: int) -> Table:
    """Show what was copied as it is, and why."""
    headings = ("left as it was, because", "tensors", "MB", "such as")
    table = narrow_table(f"{num_quantized} layers were quantized", headings, folding=(headings[0], "such as"))
    for group in groups:
        kinds = list(dict.fromkeys(name.rstrip("0123456789").rstrip(".").rpartition(".")[2] for name in group.names))
        shown = ", ".join(kinds[:_MOST_KINDS]) + (", ..." if len(kinds) > _MOST_KINDS else "")
        table.add_row(group.reason, str(len(group.names)), f"{group.nbytes / 1e6:.2f}", shown)
    return table


def _error_table(result: "QuantizeResult", rounding: str, chart: bool) -> Table:
    """Show both roundings' errors: every layer with --report, else the worst."""
    shown = result.layers
    if not chart and len(shown) > _MOST_LAYERS:
        shown = tuple(sorted(shown, key=lambda layer: -layer.errors.relative_best)[:_MOST_LAYERS])
    rows, measured = sum(layer.rows for layer in result.layers), sum(layer.errors.rows for layer in result.layers)
    headings = ("layer", "shape", "best", "quark", *(("# best + quark",) if chart else ()))
    table = narrow_table("relative mean squared error by layer", headings, folding=("layer",))
    table.caption = (
        f"{len(shown)} of {len(result.layers)} layers, measured over {measured} of {rows} rows; "
        f"rounding written: {rounding}"
    )
    if chart:
        table.columns[-1].justify = "left"
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
