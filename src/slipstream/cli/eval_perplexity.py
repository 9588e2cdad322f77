"""`slipstream eval perplexity`: how well a server foretells texts, beside another one."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.progress import Phases

if TYPE_CHECKING:
    from slipstream.records.evals import PerplexityRecord


def perplexity(
    url: Annotated[str, typer.Option(help="The server, e.g. http://127.0.0.1:8600.")],
    texts: Annotated[Path, typer.Option(help="JSONL with 'text' (or 'prompt') on each line.")],
    baseline_url: Annotated[str | None, typer.Option(help="A server to compare with, text by text.")] = None,
    arm: Annotated[str, typer.Option(help="What to call the server in the record.")] = "server",
    baseline_arm: Annotated[str, typer.Option(help="What to call the other one.")] = "baseline",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N texts.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Record file.", show_default="out/eval/perplexity.ARM.json")] = None,
) -> None:
    """Score texts by the log probabilities a server gives their tokens; for settings that change logits.

    Speculation changes none, so with a draft and without the figure is the same. Keys in FP8 and weights in another
    format do.

    Example:
      slipstream eval perplexity --url http://HOST:8000 --baseline-url http://HOST:8001 --texts t.jsonl
    """
    from rich.console import Console

    from slipstream.bench.client import Client, open_session
    from slipstream.bench.evals.perplexity import run_perplexity
    from slipstream.bench.workload import read_prompts
    from slipstream.records.store import check_writable, write_record

    path = out or Path("out/eval") / f"perplexity.{arm}.json"
    check_writable(path)
    scored = [text for text, _ in read_prompts(texts, chat=False)[:limit]]

    async def run() -> "PerplexityRecord":
        with Phases(Console(stderr=True)) as phases:
            phase = phases.start("texts", len(scored) * (1 if baseline_url is None else 2), "texts")
            async with open_session() as session:
                other = None if baseline_url is None else await Client.connect(session, baseline_url)
                clients = (await Client.connect(session, url), other)
                return await run_perplexity(clients, (arm, baseline_arm), scored, concurrency, phase.advance)

    record = asyncio.run(run())
    write_record(path, record)
    print(f"{arm}: perplexity {record.perplexity():.4f} over {record.num_tokens} tokens of {len(record.items)} texts")
    if record.baseline_arm is not None:
        mean, error = record.change()
        print(f"  against {baseline_arm}: {mean:+.5f} +- {error:.5f} of a token's log probability")
    print(f"record: {path}")
