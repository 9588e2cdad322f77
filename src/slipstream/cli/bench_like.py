"""`slipstream bench like`: the load of another benchmark client's line, measured by ours."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.cli.tables import narrow_table

if TYPE_CHECKING:
    from slipstream.bench.like import LikeLine
    from slipstream.bench.measure import Measurement


def like(
    line: Annotated[list[str], typer.Argument(metavar="LINE...", help="The client's command line, behind `--`.")],
    url: Annotated[
        str | None, typer.Option(help="The server, where it is not the one the line names.", show_default="the line's")
    ] = None,
    token_range: Annotated[
        str | None, typer.Option(help="Token ids for random prompts, FIRST:LAST.", show_default="the server's own")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file to write the figures to.")] = None,
) -> None:
    """Send a server what `vllm bench serve` or `sglang.bench_serving` would, and show the figures they show.

    Example:
      slipstream bench like -- python3 -m sglang.bench_serving --dataset-name random --random-input 1024
        --random-output 128 --num-prompts 32 --max-concurrency 8 --random-range-ratio 1.0 --port 8000
    """
    from slipstream.bench.like import read_line
    from slipstream.bench.recipe_file import token_ids_between
    from slipstream.records.store import write_text

    asked = read_line(line)
    console = Console(stderr=True)
    for notice in asked.notices:
        console.print(notice, style="yellow", markup=False, highlight=False)
    tokens = None if token_range is None else token_ids_between(token_range)
    found = asyncio.run(_measure(asked, url or asked.url, tokens))
    for reason in found.reasons:
        console.print(reason, style="red", markup=False, highlight=False)
    _show(found, asked)
    if out is not None:
        write_text(out, _as_json(found, line, url or asked.url))
    if found.reasons:
        raise typer.Exit(1)


async def _measure(asked: "LikeLine", url: str, tokens: tuple[int, int] | None) -> "Measurement":
    from slipstream.bench.client import Client, open_session
    from slipstream.bench.like import measure_like, token_range_of

    async with open_session() as session:
        client = await Client.connect(session, url)
        return await measure_like(client, asked, tokens or await token_range_of(client))


def _show(found: "Measurement", asked: "LikeLine") -> None:
    console = Console(markup=False)
    latency, throughput = found.latency, found.throughput
    if latency is None or throughput is None:
        return
    done = [request for request in found.requests if request.error is None]
    table = narrow_table("", ("", "value"))
    for name, value in (
        ("successful requests", f"{len(done)} of {asked.load.num_requests}"),
        ("streams at once", str(asked.load.concurrency)),
        ("duration (s)", f"{throughput.duration_s:.2f}"),
        ("input tokens", str(sum(request.input_tokens for request in done))),
        ("output tokens", str(sum(request.output_tokens for request in done))),
        ("requests/s", f"{throughput.requests_per_s:.2f}"),
        ("output tok/s", f"{throughput.output_tok_s:.2f}"),
        ("total tok/s", f"{throughput.total_tok_s:.2f}"),
        ("acceptance length", f"{found.acceptance.length:.2f}" if found.acceptance else "not told"),
    ):
        table.add_row(name, value)
    console.print(table)
    times = narrow_table("", ("ms", "mean", "median", "p90", "p99"), folding=("ms",))
    rows = (("TTFT", latency.ttft_ms), ("TPOT", latency.tpot_ms), ("ITL", latency.itl_ms))
    for name, one in (*rows, ("ITL by token", latency.itl_token_ms), ("E2E", latency.e2e_ms)):
        if one is not None:
            times.add_row(name, *(f"{value:.2f}" for value in (one.mean, one.median, one.p90, one.p99)))
    console.print(times)


def _as_json(found: "Measurement", line: list[str], url: str) -> str:
    import dataclasses
    import json

    figures = {name: value for name, value in dataclasses.asdict(found).items() if name != "requests"}
    return json.dumps({"line": line, "url": url, **figures}, indent=1) + "\n"
