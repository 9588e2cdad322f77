"""Running servers as the target: texts by token ids, and its states, from slipstream, vLLM or SGLang, many at once.

Everything goes by token ids, so a text is what the target wrote and not what a tokenizer makes of it again. A server
that fails is left alone for a while and its requests go to the others; the run ends only where none answers.
"""

import fcntl
import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import ConfigError, DataError
from slipstream.train.data.generate import GenerationRequest, GenerationResult, GenerationStats, RequestSource

AT_ONCE = 32
"""Requests under way at each server, unless `generate.rows` says how many there are in all."""
_TIMEOUT_S = 900.0
_TRIES = 6
_PAUSE_S = 2.0  # after a failure, doubled each time
_KINDS = ("slipstream", "vllm", "sglang")
_log = logging.getLogger(__name__)

Json = dict[str, Any]
_Q = TypeVar("_Q")
_T = TypeVar("_T")


@dataclass
class Server:
    """One server: who made it, and what it calls its model."""

    url: str
    kind: str
    model: str
    root: str
    max_length: int | None
    busy: int = 0
    rests_until: float = 0.0

    @staticmethod
    def connect(url: str) -> "Server":
        """Ask a server what it is."""
        url = url.rstrip("/").removesuffix("/v1")
        try:
            models = _call(f"{url}/v1/models", None, 30.0).get("data")
        except _UnreachableError as error:
            raise DataError(f"{error}. Start the server first, or name one that runs.") from error
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise DataError(f"{url}/v1/models: names no model; is this an OpenAI-compatible server?")
        first = models[0]
        kind = str(first.get("owned_by", ""))
        if kind not in _KINDS:
            raise DataError(
                f"{url}: is run by {kind or 'an unknown program'}, and answers by token ids are known of "
                f"{', '.join(_KINDS)}. Let one of these serve the target."
            )
        length = first.get("max_model_len")
        return Server(url, kind, str(first["id"]), str(first.get("root") or first["id"]), length)

    def write(self, request: GenerationRequest, eos: Sequence[int]) -> GenerationResult:
        """Have a prompt continued."""
        if self.kind == "sglang":
            return self._write_sglang(request, eos)
        body = self._body(request.prompt, request.max_new) | {
            "temperature": request.temperature, "top_p": request.top_p, "stop_token_ids": list(eos),
        }  # fmt: skip
        if self.kind == "slipstream":  # vLLM's CPU build dies of seeds where prompts come in parts (0.32)
            body["seed"] = request.seed
        answer = _call(f"{self.url}/v1/completions", body)
        if (path := _states_path(answer)) is not None:  # a server that writes states writes these, too
            discard_states(path)
        choice = self._choice(answer)
        tokens = _ids(choice.get("token_ids"))
        if tokens is None:
            raise DataError(f"{self.url}/v1/completions: answered without 'token_ids' (asked by return_token_ids).")
        return GenerationResult(request, tokens, choice.get("finish_reason") == "stop")

    def states_file(self, ids: Sequence[int]) -> Path:
        """Have the states of a text computed, and return where vLLM's connector writes them."""
        answer = _call(f"{self.url}/v1/completions", self._body(ids, 1) | {"temperature": 0})
        if (path := _states_path(answer)) is None:
            raise ConfigError(f"{self.url}: gives no states of its target ('hidden_states_path' is missing).")
        return path

    def _body(self, ids: Sequence[int], max_new: int) -> Json:
        return {
            "model": self.model, "prompt": list(ids), "max_tokens": max_new, "return_token_ids": True,
            "skip_special_tokens": False,
        }  # fmt: skip

    def _choice(self, answer: Json) -> Json:
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise DataError(f"{self.url}/v1/completions: answered without one choice.")
        return choices[0]

    def _write_sglang(self, request: GenerationRequest, eos: Sequence[int]) -> GenerationResult:
        sampling = {
            "max_new_tokens": request.max_new, "temperature": request.temperature, "top_p": request.top_p,
            "sampling_seed": request.seed % 2**31, "stop_token_ids": list(eos), "skip_special_tokens": False,
        }  # fmt: skip
        answer = _call(f"{self.url}/generate", {"input_ids": list(request.prompt), "sampling_params": sampling})
        tokens, meta = _ids(answer.get("output_ids")), answer.get("meta_info")
        if tokens is None or not isinstance(meta, dict):
            raise DataError(f"{self.url}/generate: answered without 'output_ids' and 'meta_info'.")
        reason = meta.get("finish_reason")
        ended = isinstance(reason, dict) and reason.get("type") == "stop"
        if ended and isinstance(reason, dict) and reason.get("matched") in eos and tokens[-1:] != [reason["matched"]]:
            tokens.append(int(reason["matched"]))  # some versions leave the end token out
        return GenerationResult(request, tokens, ended)


class Servers:
    """Several servers of one target, as one."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.servers = [Server.connect(url) for url in urls]
        self._lock = threading.Lock()
        if len(roots := {server.root for server in self.servers}) > 1:
            raise ConfigError(
                f"The servers run different models: {', '.join(sorted(roots))}. Name those of one target."
            )

    @property
    def target(self) -> str:
        """What the servers call the target's checkpoint."""
        return self.servers[0].root

    @property
    def max_length(self) -> int | None:
        """The longest text that all of them take, as far as they say."""
        known = [server.max_length for server in self.servers if server.max_length is not None]
        return min(known, default=None)

    def at_once(self, rows: int | None) -> int:
        """Return how many requests are under way together."""
        return rows or AT_ONCE * len(self.servers)

    def ask(self, work: Callable[[Server], _T]) -> _T:
        """Have the least busy server do something; where one fails, another."""
        for attempt in range(_TRIES):
            server = self._take()
            try:
                return work(server)
            except _UnreachableError as error:
                trouble = str(error)
                server.rests_until = time.monotonic() + _PAUSE_S * 2**attempt
                _log.warning("%s; tried again elsewhere or later", trouble)
            finally:
                with self._lock:
                    server.busy -= 1
            with self._lock:
                rest = min(server.rests_until for server in self.servers) - time.monotonic()
            time.sleep(max(0.0, rest))
        raise DataError(f"{trouble}. No server answered in {_TRIES} tries; what was written is kept: start again.")

    def each(self, work: Callable[[Server], _T]) -> list[_T]:
        """Have every server do something, one after the other."""
        try:
            return [work(server) for server in self.servers]
        except _UnreachableError as error:
            raise DataError(f"{error}.") from error

    def all(self, asked: Sequence[_Q], work: Callable[[Server, _Q], _T], rows: int | None = None) -> list[_T]:
        """Have every item done by some server, many at once; results in order."""
        with ThreadPoolExecutor(self.at_once(rows)) as pool:
            return list(pool.map(lambda item: self.ask(lambda server: work(server, item)), asked))

    def _take(self) -> Server:
        with self._lock:
            now = time.monotonic()
            server = min(self.servers, key=lambda server: (max(0.0, server.rests_until - now), server.busy))
            server.busy += 1
            return server


class RemoteGenerator:
    """Continues prompts by servers; the counterpart of `slipstream.train.data.generate.Generator`."""

    def __init__(self, servers: Servers, eos_token_ids: Sequence[int], rows: int | None, vocab_size: int) -> None:
        self._servers, self._eos, self._vocab_size = servers, tuple(eos_token_ids), vocab_size
        self._rows = servers.at_once(rows)

    def run(
        self,
        source: RequestSource,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[GenerationStats], None] = lambda stats: None,
    ) -> GenerationStats:
        """Serve the source until it has nothing left, or until `stop` says so (unfinished texts are then dropped)."""
        started, texts, tokens = time.monotonic(), 0, 0
        pool = ThreadPoolExecutor(self._rows)
        under_way: set[Future[GenerationResult]] = set()
        try:
            while not stop():
                free = self._rows - len(under_way)
                under_way |= {pool.submit(self._write, request) for request in source.take(free)}
                if not under_way:
                    break
                done, under_way = wait(under_way, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    texts, tokens = texts + 1, tokens + len(result.tokens)
                    source.give(result)
                progress(GenerationStats(texts, tokens, time.monotonic() - started))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return GenerationStats(texts, tokens, time.monotonic() - started)

    def _write(self, request: GenerationRequest) -> GenerationResult:
        result = self._servers.ask(lambda server: server.write(request, self._eos))
        if result.tokens and not 0 <= min(result.tokens) <= max(result.tokens) < self._vocab_size:
            raise DataError(
                f"{self._servers.servers[0].url}: wrote token {max(result.tokens)}, and the target has "
                f"{self._vocab_size}: the server runs another model."
            )
        return result


class _UnreachableError(Exception):
    """A server did not answer, or said that it cannot now."""


def _call(url: str, body: Json | None, timeout_s: float = _TIMEOUT_S) -> Json:
    """Post an object (or fetch, without one) and return the object that comes back."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: is no address of a server; write it as http://127.0.0.1:8000.")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        text = error.read(500).decode(errors="replace").strip()
        if error.code in (429, 503) or error.code >= 500:
            raise _UnreachableError(f"{url}: HTTP {error.code}: {text[:200]}") from error
        raise DataError(f"{url}: HTTP {error.code}: {text}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _UnreachableError(f"{url}: no answer ({error})") from error
    except ValueError as error:
        raise DataError(f"{url}: answered with something that is not JSON ({error}).") from error
    if not isinstance(answer, dict):
        raise DataError(f"{url}: answered with something that is no JSON object.")
    return answer


def wait_for_states(path: Path) -> None:
    """Wait until vLLM's connector has written a file: it holds the lock beside it until then."""
    with _lock_of(path).open(encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def discard_states(path: Path) -> None:
    """Delete a file of states and its lock, where this machine sees them."""
    if _lock_of(path).exists():
        wait_for_states(path)
        path.unlink(missing_ok=True)
        _lock_of(path).unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _states_path(answer: Json) -> Path | None:
    """Return where a server says it writes states; what it names is deleted once read, so it must look like them."""
    params = answer.get("kv_transfer_params")
    path = params.get("hidden_states_path") if isinstance(params, dict) else None
    return Path(path) if isinstance(path, str) and path.endswith(".safetensors") else None


def _ids(value: Any) -> list[int] | None:  # parsed JSON
    return value if isinstance(value, list) and all(isinstance(item, int) for item in value) else None
