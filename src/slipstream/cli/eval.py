"""`slipstream eval`: GSM8K, perplexity, token-for-token comparison of two servers, drafts side by side."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.eval_drafts import drafts
from slipstream.cli.eval_perplexity import perplexity
from slipstream.cli.progress import Phases

if TYPE_CHECKING:
    from slipstream.records.evals import Gsm8kRecord, LosslessRecord

app = typer.Typer(
    no_args_is_help=True,
    help="Check that no answer changed, and what drafts are worth.\n\n"
    "Example:\n  slipstream eval drafts questions.jsonl -d auto -d ngram",
)
app.command()(drafts)
app.command()(perplexity)

Url = Annotated[str, typer.Option(help="The server, e.g. http://127.0.0.1:8600.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at a time.")]


@app.command()
def gsm8k(
    url: Url,
    data: Annotated[Path, typer.Option(help="Folder with train.jsonl and test.jsonl (or .xz).")],
    arm: Annotated[str, typer.Option(help="What to call this server in the record.")] = "server",
    shots: Annotated[int, typer.Option(min=0, help="Worked examples before each question.")] = 5,
    chat: Annotated[bool, typer.Option("--chat/--completions", help="Chat turns, or one plain prompt.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N questions.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    concurrency: Concurrency = 8,
    out: Annotated[Path | None, typer.Option(help="Record file.", show_default="out/eval/gsm8k.ARM.json")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Another arm's record to compare with, item by item.")] = None,
    lm_eval: Annotated[
        Path | None, typer.Option("--lm-eval", help="A Python that has lm-eval: let it ask and score.")
    ] = None,
) -> None:
    """Score a server on GSM8K as lm-eval does (strict-match and flexible-extract).

    Example:
      slipstream eval gsm8k --url http://127.0.0.1:8000 --data gsm8k --limit 200
    """
    from rich.console import Console

    from slipstream.bench.client import Client, open_session
    from slipstream.bench.evals.gsm8k import load_data
    from slipstream.bench.evals.run import Gsm8kSettings, run_gsm8k
    from slipstream.records.store import check_writable, write_record

    path = out or Path("out/eval") / f"gsm8k.{arm}.json"
    check_writable(path)
    other = None if baseline is None else _baseline(baseline)
    settings = Gsm8kSettings(data, shots, max_tokens, chat, limit, concurrency, lm_eval)
    total = len(load_data(data).test[:limit])

    async def run() -> "Gsm8kRecord":
        with Phases(Console(stderr=True)) as phases:
            phase = phases.start("questions", total, "questions")
            async with open_session() as session:
                client = await Client.connect(session, url)
                return await run_gsm8k(client, arm, settings, phase.advance)

    record = asyncio.run(run())
    write_record(path, record)
    print(f"{arm}: {shots}-shot GSM8K, {len(record.items)} questions, scored by {record.scorer}")
    print(f"  flexible-extract {record.score('flexible'):.4f}\n  strict-match     {record.score('strict'):.4f}")
    if other is not None:
        _compare(other, record)
    print(f"record: {path}")


@app.command()
def lossless(
    url: Url,
    baseline_url: Annotated[str, typer.Option(help="The server without speculation.")],
    prompts: Annotated[Path, typer.Option(help="JSONL with 'prompt' or 'messages' on each line.")],
    arm: Annotated[str, typer.Option(help="What to call the server in the record.")] = "arm",
    baseline_arm: Annotated[str, typer.Option(help="What to call the other one.")] = "no-spec",
    chat: Annotated[bool, typer.Option("--chat/--completions", help="Chat turns, or plain prompts.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens compared for each prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of the seeded comparisons; greedy is always compared.")
    ] = 0.8,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed to compare; may be given again.", show_default="0 and 1")
    ] = None,
    concurrency: Concurrency = 4,
    out: Annotated[Path | None, typer.Option(help="Record file.", show_default="out/eval/lossless.ARM.json")] = None,
) -> None:
    """Compare two servers token for token, greedily and with seeds; exit 1 when they differ.

    Example:
      slipstream eval lossless --url http://HOST:8000 --baseline-url http://HOST:8001 --prompts p.jsonl
    """
    from rich.console import Console

    from slipstream.bench.client import Client, open_session
    from slipstream.bench.evals.lossless import Settings
    from slipstream.bench.evals.run import run_lossless
    from slipstream.bench.workload import Prompt, read_prompts
    from slipstream.records.store import check_writable, write_record

    path = out or Path("out/eval") / f"lossless.{arm}.json"
    check_writable(path)
    entries = read_prompts(prompts, chat)[:limit]
    asked = [Prompt(max_tokens, text=text, messages=messages) for text, messages in entries]
    settings = Settings(tuple(seed) if seed else (0, 1), temperature, concurrency)

    async def run() -> "LosslessRecord":
        with Phases(Console(stderr=True)) as phases:
            phase = phases.start("answers", 2 * len(asked) * len(settings.samplings()), "answers")
            async with open_session() as session:
                clients = (await Client.connect(session, baseline_url), await Client.connect(session, url))
                names = (baseline_arm, arm)
                return await run_lossless(clients, names, asked, settings, phase.advance)

    record = asyncio.run(run())
    write_record(path, record)
    print(f"{record.num_identical()} of {len(record.cases)} outputs are identical token for token")
    for case in record.cases:
        if case.difference is not None:
            found = case.difference
            margin = "unknown" if found.top_two_margin is None else f"{found.top_two_margin:.4f}"
            print(
                f"  prompt {case.prompt}, temperature {case.temperature:g}, seed {case.seed}: token {found.position} "
                f"is {found.token!r} instead of {found.baseline_token!r} (top-two margin {margin})"
            )
    print(f"record: {path}")
    if record.num_identical() < len(record.cases):
        raise typer.Exit(1)


def _baseline(path: Path) -> "Gsm8kRecord":
    from slipstream.bench.evals.gsm8k import EvalError
    from slipstream.records.evals import Gsm8kRecord
    from slipstream.records.store import read_record

    record = read_record(path)
    if not isinstance(record, Gsm8kRecord):
        raise EvalError(f"{path}: is not a GSM8K record.")
    return record


def _compare(other: "Gsm8kRecord", record: "Gsm8kRecord") -> None:
    from slipstream.bench.evals.gsm8k import EvalError
    from slipstream.records.compare import mcnemar
    from slipstream.records.evals import FILTERS, changed

    if (other.data_sha256, other.num_shots, other.chat) != (record.data_sha256, record.num_shots, record.chat):
        raise EvalError(
            f"--baseline, {other.arm}: other questions or another way of asking, so the answers cannot be paired."
        )
    for which in FILTERS:
        changes = changed(other.items, record.items, which)
        p = mcnemar(len(changes.to_right), len(changes.to_wrong))
        right, wrong = len(changes.to_right), len(changes.to_wrong)
        print(
            f"  against {other.arm}, {which}: {right} became right, {wrong} wrong of {changes.num_pairs} (p = {p:.3f})"
        )
