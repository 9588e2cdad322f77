"""`slipstream bench rank`: one tensor-parallel rank of a full-size model, measured on one device."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.measure.rank import StepFigures


class _Defaults(NamedTuple):
    tp: int
    batch: str
    context: str


_CALLS_PER_LAYER = 2  # all-reduces: after attention, and after the feed-forward part


def rank(
    model: Annotated[
        str, typer.Option(help="The model whose rank is built, with random weights: kimi-k2.5 or minimax-m2.5.")
    ] = "kimi-k2.5",
    tp: Annotated[
        int | None, typer.Option(help="Ranks the model is split over; one of them is built.", show_default="8")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Requests at a time, with commas.", show_default="1,2,8,40")] = None,
    context: Annotated[
        str | None, typer.Option(help="Keys of each request, with commas.", show_default="1024,10240")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="How experts are stored.", show_default="as published")
    ] = None,
    routing: Annotated[
        Literal["spread", "clustered"],
        typer.Option(help="Whether rows choose experts as apart as trained weights make them, or flock to the same."),
    ] = "spread",
    nodes: Annotated[int, typer.Option(min=1, help="Rows of a verified chain, its root included.")] = 4,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A tile to try, e.g. stage2.block_k=128.")
    ] = None,
    kernels: Annotated[Literal["auto", "triton", "reference"], typer.Option(help="The kernels.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the rank runs: auto, cpu or cuda[:N].")] = "auto",
    all_reduce_us: Annotated[
        float, typer.Option(min=0, help="Model each all-reduce as so long, in a column of its own.")
    ] = 0,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="The architecture, batches and contexts in proportions any machine can afford."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON, too.")] = None,
) -> None:
    """Build one rank of a full-size model on one device, and time decoding, verifying and drafting.

    Weights are random, kernels and bytes are real. Nothing is sent to other ranks: their part, the all-reduces, can be
    modelled with --all-reduce-us and is never part of the measured milliseconds.

    Example:
      slipstream bench rank --model kimi-k2.5 --tp 8 --batch 1,40 --context 1024

      slipstream bench rank --model minimax-m2.5 --tiny
    """
    import torch

    from slipstream.measure.rank import Rank, rank_kernels
    from slipstream.measure.rank_models import rank_of
    from slipstream.records.store import check_writable

    usual = _Defaults(2, "1,2", "64,256") if tiny else _Defaults(8, "1,2,8,40", "1024,10240")
    batches = _numbers("--batch", batch or usual.batch)
    contexts = _numbers("--context", context or usual.context)
    tp = usual.tp if tp is None else tp
    if out is not None:
        check_writable(out)
    shape = rank_of(model, tp, tiny)
    form = form or shape.experts
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if place == "cpu" and not tiny:
        raise ConfigError(f"A full-size rank of {model} needs a GPU, and torch sees none here; --tiny runs anywhere.")
    found = rank_kernels(torch.device(place), kernels, _settings(settings or []))
    bandwidth = None
    if found.device.type != "cpu":
        from slipstream.kernels.triton.bandwidth import read_bandwidth

        bandwidth = read_bandwidth(found.device)
        print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    built = Rank(shape, form, found, (max(batches), max(contexts)), bandwidth, routing)
    print(
        f"{model}, one of {tp} ranks, {form} experts, {routing} routing: {built.resident_bytes / 1e9:.1f} GB of weights"
    )
    calls = _CALLS_PER_LAYER * shape.target.num_layers
    print(_HEADINGS + (f"  + {calls} all-reduces of {all_reduce_us:g} us (modelled)" if all_reduce_us else ""))
    rows = []
    for keys in contexts:
        for requests in batches:
            for step in (
                built.decode(requests, keys),
                built.verify(requests, keys, nodes),
                built.draft_step(requests, keys),
            ):
                rows.append(step)
                print(_line(step, calls * all_reduce_us * 1e-3 if step.step != "draft" else 0.0))
    if out is not None:
        _write(out, {"model": model, "tp": tp, "format": form, "routing": routing, "read_bandwidth": bandwidth,
                     "resident_bytes": built.resident_bytes, "settings": settings or []}, rows)  # fmt: skip


_HEADINGS = (
    f"{'step':8}{'batch':>6}{'context':>9}{'rows':>6}{'ms':>9}{'experts':>9}{'GB read':>9}{'floor ms':>10}{'%':>7}"
)


def _line(step: "StepFigures", modelled_ms: float) -> str:
    floor = "-" if step.floor_ms is None else f"{step.floor_ms:.2f}"
    percent = "-" if step.percent_of_floor is None else f"{step.percent_of_floor:.1f}"
    return (
        f"{step.step:8}{step.batch:6}{step.context:9}{step.rows:6}{step.ms:9.3f}{step.experts_hit:9.1f}"
        f"{step.read_bytes / 1e9:9.2f}{floor:>10}{percent:>7}"
        + (f"  {step.ms + modelled_ms:.3f} ms with the modelled all-reduces" if modelled_ms else "")
    )


def _write(path: Path, header: dict[str, object], rows: "list[StepFigures]") -> None:
    from slipstream.records.store import write_text

    steps = [asdict(row) | {"percent_of_floor": row.percent_of_floor} for row in rows]
    write_text(path, json.dumps(header | {"steps": steps}, indent=1) + "\n")


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: write whole numbers with commas, such as 1,8,40.") from None
    if min(numbers) < 1:
        raise ConfigError(f"{option} {text!r}: the numbers are at least 1.")
    return numbers


def _settings(pairs: list[str]) -> dict[str, int]:
    settings = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not value.isdigit():
            raise ConfigError(f"--set {pair!r}: write it as NAME=NUMBER, such as stage2.block_k=128.")
        settings[name] = int(value)
    return settings
