"""`slipstream inspect`: what a checkpoint holds, without loading it."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli import options
from slipstream.cli.printable import printable

if TYPE_CHECKING:
    from slipstream.checkpoint.spec import BlockDraftSpec, BlockSpec, DraftSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec
    from slipstream.checkpoint.summary import CheckpointSummary


def inspect(
    path: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id, or 'embedded'.")] = "embedded",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    target_layers: Annotated[
        int | None, typer.Option(min=1, help="The target's number of layers, to read a draft's captured layers by.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A target's folder or hub id: say whether the draft fits it, or why not.")
    ] = None,
) -> None:
    """Show a checkpoint's architecture, dtype table, sizes, quantization and captured layers.

    Examples:
      slipstream inspect

      slipstream inspect path/to/draft --target path/to/target

      slipstream inspect path/to/draft --target-layers 32 --tensors
    """
    from slipstream.checkpoint.reader import open_checkpoint
    from slipstream.checkpoint.summary import summarise

    console = Console(markup=False)  # a folder may be called [bold]
    options.fetch_if_embedded(path, Console(stderr=True))
    fits = None
    if target is not None:
        spec = _target_spec(target)
        target_layers = spec.num_layers
    summary = summarise(open_checkpoint(path), target_layers)
    if target is not None:
        fits = _fit(summary, spec, target)
    console.print(_overview(summary, fits))
    console.print(_dtypes(summary))
    if tensors:
        console.print(_tensors(summary))


def _target_spec(target: str) -> "ModelSpec":
    from slipstream.checkpoint.config import model_spec
    from slipstream.checkpoint.reader import open_checkpoint

    source = open_checkpoint(target)
    return model_spec(source.config, source.folder)


def _fit(summary: "CheckpointSummary", target: "ModelSpec", name: str) -> str:
    """Say whether a draft fits a target, or why it does not."""
    from slipstream.checkpoint.spec import BlockDraftSpec, DraftSpec
    from slipstream.errors import DraftMismatchError
    from slipstream.models.load import check_pair

    if not isinstance(summary.spec, DraftSpec | BlockDraftSpec):
        return f"{name}: no, since this is no draft that slipstream reads"
    try:
        check_pair(summary.spec, target, "no")
    except DraftMismatchError as error:
        return f"{name}: {error}"
    return f"{name}: yes, by its sizes and captured layers"


def _overview(summary: "CheckpointSummary", fits: str | None = None) -> Table:
    table = Table(title=printable(str(summary.path)), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("kind", summary.kind)
    table.add_row("architecture", printable(summary.architecture))
    table.add_row("parameters", f"{summary.num_parameters / 1e6:,.1f} M")
    table.add_row("size", f"{_megabytes(summary.nbytes)} in {len(summary.files)} file(s)")
    table.add_row("quantization", printable(summary.quantization or "none"))
    if summary.captures is not None:
        captures = summary.captures
        table.add_row("captured layers", f"after {list(captures.layers)} blocks (file says {list(captures.raw)})")
    if summary.made_for is not None:
        table.add_row("made for", printable(summary.made_for))
    if summary.same_sizes:
        table.add_row("has the sizes of", "; ".join(summary.same_sizes))
    if fits is not None:
        table.add_row("fits", printable(fits))
    if summary.spec is not None:
        for name in _SHOWN:
            value = getattr(summary.spec, name, None)
            if value is not None:
                table.add_row(_TITLES.get(name, name.replace("_", " ")), _FORMS.get(name, str)(value))
        if seen := _seen(summary.spec):
            table.add_row("attention", seen)
    if summary.problem is not None:
        table.add_row("cannot run", printable(summary.problem))
    return table


def _seen(spec: "ModelSpec | DraftSpec | BlockDraftSpec") -> str:
    """Say what tokens see, block by block, where it is not all keys by heads that are alike; else nothing."""
    from slipstream.checkpoint.spec import BlockDraftSpec, DraftSpec

    if isinstance(spec, BlockDraftSpec):
        layers = zip(spec.windows, spec.causal, strict=True)
        seen = [
            f"{_ALL_KEYS if w is None else f'the last {w} keys'}, {'causal' if c else 'both ways'}" for w, c in layers
        ]
        return "; ".join(f"{count} layer(s): {what}" for what, count in Counter(seen).items())
    if isinstance(spec, DraftSpec):
        return "" if spec.sliding_window is None else f"the last {spec.sliding_window} keys"
    kinds = Counter(_sight(spec.block(index)) for index in range(spec.num_layers))
    if set(kinds) == {_ALL_KEYS} and not spec.sinks:
        return ""
    said = [f"{count} block(s): {what}" if len(kinds) > 1 else what for what, count in kinds.items()]
    return "; ".join([*said, *(["a learned score for no key"] if spec.sinks else [])])


def _sight(block: "BlockSpec") -> str:
    words = [_ALL_KEYS]
    if block.window is not None:
        words = [f"the last {block.window} keys"]
    elif block.chunk is not None:
        words = [f"chunks of {block.chunk} keys"]
    if block.rope is None:
        words.append("no positions")
    if block.heads is not None:
        words.append(f"{block.heads[1]} key head(s) of {block.heads[0]}")
    return ", ".join(words)


def _rope(rope: "RopeSpec") -> str:
    if rope.scaling == "proportional":
        return f"theta {rope.theta:g}, {2 * rope.turning} of {rope.rotary_dim} dimensions turned"
    stretched = "" if rope.scaling == "none" else f", {rope.scaling} scaling by {rope.factor:g}"
    return f"theta {rope.theta:g}, {rope.rotary_dim} dimensions{stretched}"


def _mla(mla: "MlaSpec") -> str:
    queries = "" if mla.q_rank is None else f", queries through {mla.q_rank}"
    return (
        f"one latent of {mla.kv_rank} + {mla.rope_dim} rotary per token{queries}; heads of {mla.nope_dim} + "
        f"{mla.rope_dim}, values of {mla.value_dim}"
    )


def _moe(moe: "MoeSpec") -> str:
    shared = f", and one of {moe.shared_size} for all" if moe.shared_size else ""
    count = len(moe.dense_layers)
    first = "the first " if moe.dense_layers == tuple(range(count)) else ""
    dense = f"; {first}{count} block(s) dense" if count else ""
    return f"{moe.routing.top_k} of {moe.num_experts}, {moe.intermediate_size} wide{shared}{dense}"


_ALL_KEYS = "all keys"
_SHOWN = (
    "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "mla", "moe",
    "vocab_size", "draft_vocab_size", "max_position", "rope", "tie_embeddings", "feedback", "residual", "feature_norm",
    "block_size", "mask_token_id",
)  # fmt: skip
_TITLES = {
    "mla": "latent attention",
    "moe": "experts",
    "mask_token_id": "mask token",
    "block_size": "tokens of a block",
}
_FORMS: dict[str, Callable[[Any], str]] = {"rope": _rope, "mla": _mla, "moe": _moe}


def _dtypes(summary: "CheckpointSummary") -> Table:
    table = Table(title="stored types", title_justify="left")
    table.add_column("dtype")
    for name in ("tensors", "parameters", "size"):
        table.add_column(name, justify="right")
    for row in summary.dtypes:
        table.add_row(row.dtype, str(row.num_tensors), f"{row.num_parameters:,}", _megabytes(row.nbytes))
    return table


def _tensors(summary: "CheckpointSummary") -> Table:
    table = Table(title="tensors", title_justify="left")
    for name in ("name", "dtype", "shape"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right")
    for tensor in summary.tensors:
        table.add_row(printable(tensor.name), tensor.dtype, str(list(tensor.shape)), _megabytes(tensor.nbytes))
    return table


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
