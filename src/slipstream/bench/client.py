"""A streaming client for OpenAI-compatible servers that notes when every chunk arrived."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from slipstream.bench.metrics import Exchange, repetition_of
from slipstream.bench.workload import ChatMessage, Prompt, Template
from slipstream.errors import SlipstreamError
from slipstream.records.point import RequestResult


class ServerError(SlipstreamError):
    """A server did not answer as an OpenAI-compatible server does."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a seed is sent only when it can matter."""

    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = True


@dataclass
class _Stream:
    """What has arrived of one answer."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    finished: bool = False
    counted: bool = False


class Client:
    """Talks to one server. The clock is the event loop's, so that a test can run it on simulated time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, counts_chunks: bool = False) -> None:
        self._session = session
        self.url = url.rstrip("/")
        self.model = model
        self._counts_chunks = counts_chunks

    @classmethod
    async def connect(cls, session: aiohttp.ClientSession, url: str) -> "Client":
        """Ask the server for its model, and whether it counts tokens chunk by chunk."""
        if not url.startswith(("http://", "https://")):
            raise ServerError(f"{url}: is no address of a server; write it as http://127.0.0.1:8600.")
        client = cls(session, url, "")
        models = (await client.get_json("/v1/models")).get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise ServerError(f"{url}/v1/models: names no model, so there is nothing to measure.")
        client.model = str(models[0]["id"])
        body = client._body(Prompt(1, text="Hi"), Sampling()) | {"stream_options": _STREAM_OPTIONS_BY_CHUNK}
        try:
            async with await client._post("/v1/completions", body) as response:
                client._counts_chunks = response.status == 200
                await response.read()
        except aiohttp.ClientError as error:
            raise ServerError(f"{url}/v1/completions: no answer ({_reason(error)}).") from error
        return client

    async def get_text(self, path: str) -> str:
        """Fetch a page, raising ServerError unless it is there."""
        try:
            async with self._session.get(self.url + path) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise ServerError(f"{self.url}{path}: HTTP {response.status}: {text[:200]}")
                return text
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{self.url}{path}: no answer ({_reason(error)}).") from error

    async def get_json(self, path: str) -> Mapping[str, object]:
        """Fetch a JSON object."""
        return _object(await self.get_text(path), self.url + path)

    async def post_json(self, path: str, body: Mapping[str, object], timeout_s: float = 600.0) -> Mapping[str, object]:
        """Post a JSON object and return the one that comes back."""
        try:
            async with asyncio.timeout(timeout_s), await self._post(path, body) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise ServerError(f"{self.url}{path}: HTTP {response.status}: {text[:200]}")
                return _object(text, self.url + path)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{self.url}{path}: no answer ({_reason(error)}).") from error

    async def template(self) -> Template:
        """Learn the token ids of the server's chat template from two prompts with different words in them."""
        rendered = []
        for word in ("A", "B"):
            body = {"model": self.model, "messages": [{"role": "user", "content": word}], "add_generation_prompt": True}
            tokens = (await self.post_json("/tokenize", body)).get("tokens")
            if not isinstance(tokens, list):
                raise ServerError(f"{self.url}/tokenize: answered without 'tokens'; set chat_template: false.")
            rendered.append(tuple(int(token) for token in tokens))
        return Template.between(*rendered)

    async def generate(self, prompt: Prompt, sampling: Sampling, timeout_s: float) -> Exchange:
        """Send one request and follow its stream; a failure is returned as an exchange with an error."""
        clock = asyncio.get_running_loop().time
        stream = _Stream()
        start = clock()
        error = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._follow(prompt, sampling, stream)
        except TimeoutError:
            error = f"no complete answer within {timeout_s:g} s"
        except aiohttp.ClientError as problem:
            error = f"connection: {type(problem).__name__}: {problem}"
        except ServerError as problem:
            error = str(problem)
        end = stream.times[-1] if stream.times else clock()
        if error is None:
            error = _incomplete(stream, prompt, sampling)
        text = "".join(stream.text)
        result = RequestResult(
            sent_at_s=start,
            latency_s=end - start,
            input_tokens=stream.input_tokens,
            output_tokens=stream.output_tokens,
            ttft_s=stream.times[0] - start if stream.times else None,
            num_chunks=len(stream.times),
            text_sha256=hashlib.sha256(text.encode("utf-8")).hexdigest()[:16],
            repetition=repetition_of(text),
            error=error,
        )
        return Exchange(result, tuple(stream.times), tuple(stream.tokens))

    async def _follow(self, prompt: Prompt, sampling: Sampling, stream: _Stream) -> None:
        clock = asyncio.get_running_loop().time
        path = "/v1/chat/completions" if prompt.messages else "/v1/completions"
        async with await self._post(path, self._body(prompt, sampling)) as response:
            if response.status != 200:
                raise ServerError(f"HTTP {response.status}: {(await response.text(errors='replace'))[:200]}")
            async for line in response.content:
                now = clock()
                if not line.startswith(b"data:"):
                    if line.strip() and not line.startswith((b":", b"event:", b"id:")):
                        raise ServerError(f"garbage in the stream: {line[:80]!r}")
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    stream.finished = True
                    return
                _take(stream, _object(payload.decode("utf-8", "replace"), "stream"), now)

    async def _post(self, path: str, body: Mapping[str, object]) -> aiohttp.ClientResponse:
        """Send a request; once more, on another connection, if the server closed the idle one it went out on.

        Without a byte of an answer the two cannot be told apart in time: servers close idle connections when they
        like, and a request on its way then is lost. A server that is gone refuses the second connection.
        """
        try:
            return await self._session.post(self.url + path, json=body)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._session.post(self.url + path, json=body)

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, object]:
        options = _STREAM_OPTIONS_BY_CHUNK if self._counts_chunks else {"include_usage": True}
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": prompt.output_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": options,
        }
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if sampling.temperature > 0 and sampling.seed is not None:
            body["seed"] = sampling.seed
        return body | prompt_fields(prompt)


def prompt_fields(prompt: Prompt) -> dict[str, object]:
    """Return the request fields that carry a prompt: messages for chat, else `prompt` as ids or text."""
    if prompt.messages:
        return {"messages": message_dicts(prompt.messages)}
    return {"prompt": list(prompt.token_ids) if prompt.token_ids else prompt.text}


def message_dicts(messages: tuple[ChatMessage, ...]) -> list[dict[str, str]]:
    """Return messages as the API spells them."""
    return [{"role": message.role, "content": message.content} for message in messages]


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session without limits of its own: the traffic decides how many requests run."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=60), read_bufsize=2**20
    ) as session:
        yield session


_STREAM_OPTIONS_BY_CHUNK = {"include_usage": True, "continuous_usage_stats": True}


def _take(stream: _Stream, event: Mapping[str, object], now: float) -> None:
    """Add one event of the stream; it counts as a chunk when it brought text or, unseen, tokens."""
    if "error" in event:
        raise ServerError(f"error in the stream: {str(event['error'])[:200]}")
    before = stream.output_tokens
    usage = event.get("usage")
    if isinstance(usage, dict):
        stream.input_tokens = int(usage.get("prompt_tokens", 0))
        stream.output_tokens = int(usage.get("completion_tokens", 0))
        stream.counted = True
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return
    choice = choices[0]
    if not isinstance(choice, dict):
        raise ServerError(f"garbage in the stream: choices[0] is {choice!r}")
    delta = choice.get("delta")
    parts = (delta.get("content"), delta.get("reasoning_content")) if isinstance(delta, dict) else (choice.get("text"),)
    text = "".join(part for part in parts if isinstance(part, str))
    if text or stream.output_tokens > before:
        stream.times.append(now)
        stream.tokens.append(stream.output_tokens - before)
        stream.text.append(text)


def _incomplete(stream: _Stream, prompt: Prompt, sampling: Sampling) -> str | None:
    """Say why an answer without an error still cannot be counted."""
    if not stream.finished:
        return "the stream ended before [DONE]"
    if not stream.times:
        return "the answer held no text"
    if not stream.counted:
        return "the server sent no usage, so tokens cannot be counted"
    if sampling.ignore_eos and stream.output_tokens != prompt.output_tokens:
        return f"asked for exactly {prompt.output_tokens} tokens with ignore_eos, got {stream.output_tokens}"
    return None


def _reason(error: Exception) -> str:
    """Say why there is no answer; aiohttp's own words of a refused connection name its settings."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or "timed out"


def _object(text: str, where: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ServerError(f"{where}: not JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise ServerError(f"{where}: expected a JSON object, found {text[:80]!r}")
    return value
