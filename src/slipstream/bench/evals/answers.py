"""Asks a server for whole answers, several at a time, in the order of the prompts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slipstream.bench.client import Client, ServerError, prompt_fields
from slipstream.bench.workload import Prompt

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Token:
    """One emitted token as the server spells it, and the log probabilities of the two best at its place."""

    text: str
    top_two: tuple[float, float] | None


@dataclass(frozen=True)
class Answer:
    """A whole answer; tokens are present when log probabilities were asked for."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Asking:
    """How to ask: sampling, stop words, and whether tokens come with their log probabilities."""

    temperature: float = 0.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    with_tokens: bool = False
    concurrency: int = 8
    timeout_s: float = 600.0


async def ask_all(
    client: Client, prompts: Sequence[Prompt], asking: Asking, on_done: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Return every answer; any failure raises, because half an evaluation is none."""
    return await in_order(lambda prompt: ask(client, prompt, asking), prompts, asking.concurrency, on_done)


async def in_order(
    ask_one: Callable[[Item], Awaitable[Result]], items: Sequence[Item], concurrency: int, on_done: Callable[[], None]
) -> list[Result]:
    """Return what comes of each item, so many at a time; the first failure ends the others."""
    streams = asyncio.Semaphore(concurrency)

    async def one(item: Item) -> Result:
        async with streams:
            result = await ask_one(item)
        on_done()
        return result

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def ask(client: Client, prompt: Prompt, asking: Asking) -> Answer:
    """Ask for one answer without streaming."""
    chat = bool(prompt.messages)
    body: dict[str, object] = {
        "model": client.model,
        "max_tokens": prompt.output_tokens,
        "temperature": asking.temperature,
        **prompt_fields(prompt),
    }
    if asking.stops:
        body["stop"] = list(asking.stops)
    if asking.seed is not None:
        body["seed"] = asking.seed
    if asking.with_tokens:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    reply = await client.post_json(path, body, asking.timeout_s)
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError(f"{client.url}{path}: answered without choices: {str(reply)[:120]}")
    choice = choices[0]
    text = choice["message"].get("content") if chat else choice.get("text")
    return Answer(text or "", _tokens(choice.get("logprobs"), client.url) if asking.with_tokens else ())


def _tokens(logprobs: object, url: str) -> tuple[Token, ...]:
    if not isinstance(logprobs, Mapping):
        raise ServerError(f"{url}: sends no log probabilities, which a token-for-token comparison needs.")
    if "content" in logprobs:
        rows = logprobs["content"] or []
        return tuple(Token(row["token"], _top_two([t["logprob"] for t in row["top_logprobs"]])) for row in rows)
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return tuple(
        Token(token, _top_two(list(top.values()) if top else []))
        for token, top in zip(logprobs["tokens"], tops, strict=True)
    )


def _top_two(values: Sequence[float]) -> tuple[float, float] | None:
    best = sorted(values, reverse=True)[:2]
    return (best[0], best[1]) if len(best) == 2 else None
