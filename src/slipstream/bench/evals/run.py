"""Runs an evaluation against servers that are up, and makes the record of it."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from slipstream import __version__
from slipstream.bench.client import Client
from slipstream.bench.evals.answers import Asking, ask_all
from slipstream.bench.evals.gsm8k import STOPS, load_data, prompts, score
from slipstream.bench.evals.lm_eval import LmEvalRun, run_lm_eval
from slipstream.bench.evals.lossless import Settings, compare
from slipstream.bench.hardware import find_hardware
from slipstream.bench.workload import Prompt
from slipstream.records.evals import Gsm8kItem, Gsm8kRecord, LosslessRecord


@dataclass(frozen=True)
class Gsm8kSettings:
    """What is asked.

    Args:
        data: folder with train.jsonl and test.jsonl.
        limit: only the first so many questions.
        lm_eval: an interpreter that has lm-eval, to let it ask and score instead of slipstream.
    """

    data: Path
    num_shots: int = 5
    max_tokens: int = 512
    chat: bool = False
    limit: int | None = None
    concurrency: int = 8
    lm_eval: Path | None = None


async def run_gsm8k(
    client: Client, arm: str, settings: Gsm8kSettings, on_done: Callable[[], None] = lambda: None
) -> Gsm8kRecord:
    """Ask every question and score the answers, here or through lm-eval."""
    started = now()
    data = load_data(settings.data)
    versions = {"slipstream": __version__, "python": platform.python_version()}
    items: tuple[Gsm8kItem, ...]
    if settings.lm_eval is not None:
        shape = (settings.num_shots, settings.max_tokens, settings.chat, settings.limit, settings.concurrency)
        items, version = run_lm_eval(settings.lm_eval, LmEvalRun(client.url, client.model, settings.data, *shape))
        versions["lm-eval"] = version
    else:
        asked = prompts(data, settings.num_shots, settings.max_tokens, settings.chat, settings.limit)
        answers = await ask_all(client, asked, Asking(stops=STOPS, concurrency=settings.concurrency), on_done)
        items = tuple(score(i, answer.text, data.test[i].answer) for i, answer in enumerate(answers))
    return Gsm8kRecord(
        arm=arm,
        url=client.url,
        model=client.model,
        num_shots=settings.num_shots,
        chat=settings.chat,
        scorer="slipstream" if settings.lm_eval is None else "lm-eval",
        versions=versions,
        hardware=find_hardware(),
        started_at=started,
        finished_at=now(),
        data_sha256=data.sha256,
        items=items,
    )


async def run_lossless(
    clients: tuple[Client, Client],
    arms: tuple[str, str],
    asked: Sequence[Prompt],
    settings: Settings,
    on_done: Callable[[], None] = lambda: None,
) -> LosslessRecord:
    """Compare two servers (baseline, arm) token for token."""
    started = now()
    cases = await compare(*clients, asked, settings, on_done)
    return LosslessRecord(
        arm=arms[1],
        baseline_arm=arms[0],
        url=clients[1].url,
        baseline_url=clients[0].url,
        model=clients[1].model,
        versions={"slipstream": __version__, "python": platform.python_version()},
        hardware=find_hardware(),
        started_at=started,
        finished_at=now(),
        cases=cases,
    )


def now() -> str:
    """Return the time as records write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
