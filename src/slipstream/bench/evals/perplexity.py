"""How well a server's model foretells given texts: for settings that change logits, such as keys in FP8."""

import platform
from collections.abc import Callable, Sequence

from slipstream import __version__
from slipstream.bench.client import Client, ServerError
from slipstream.bench.evals.answers import in_order
from slipstream.bench.evals.gsm8k import EvalError
from slipstream.bench.evals.run import now
from slipstream.bench.hardware import find_hardware
from slipstream.records.evals import PerplexityRecord, TextScore

TIMEOUT_S = 600.0


async def run_perplexity(
    clients: tuple[Client, Client | None],
    arms: tuple[str, str],
    texts: Sequence[str],
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> PerplexityRecord:
    """Score texts by a server and, if there is one, a baseline server."""
    started, (arm, baseline) = now(), clients
    found = await score_texts(arm, texts, concurrency, on_done)
    expected = [None] * len(texts) if baseline is None else await score_texts(baseline, texts, concurrency, on_done)
    items = []
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if theirs is not None and len(mine) != len(theirs):
            raise ServerError(f"text {index}: has {len(mine)} tokens at one server and {len(theirs)} at the other.")
        items.append(TextScore(len(mine), sum(mine), None if theirs is None else sum(theirs)))
    if not any(item.num_tokens for item in items):
        raise EvalError(
            f"None of the {len(texts)} texts has two tokens, and the first of a text is not scored: give longer ones."
        )
    return PerplexityRecord(
        arm=arms[0],
        baseline_arm=None if baseline is None else arms[1],
        url=arm.url,
        model=arm.model,
        versions={"slipstream": __version__, "python": platform.python_version()},
        hardware=find_hardware(),
        started_at=started,
        finished_at=now(),
        items=tuple(items),
    )


async def score_texts(
    client: Client, texts: Sequence[str], concurrency: int, on_done: Callable[[], None]
) -> list[list[float]]:
    """Return the log probabilities of each text's tokens but the first, which nothing foretells."""

    async def one(text: str) -> list[float]:
        body = {"model": client.model, "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
        reply = await client.post_json("/v1/completions", body, TIMEOUT_S)
        try:
            values = reply["choices"][0]["logprobs"]["token_logprobs"]  # type: ignore[index]  # checked below
            return [float(value) for value in values[1:-1]]  # the last is the answer's one token
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(
                f"{client.url}: sends no log probabilities of a prompt (echo with logprobs), which perplexity needs."
            ) from error

    return await in_order(one, texts, concurrency, on_done)
