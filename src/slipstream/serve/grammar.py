"""JSON answers: `response_format` compiled by llguidance, and its matcher walked along the paths of a tree."""

import asyncio
import functools
import hashlib
import json
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.errors import RequestError
from slipstream.serve.errors import HttpError
from slipstream.serve.grammar_trial import compile_schema, reason
from slipstream.serve.protocol import ResponseFormat
from slipstream.serve.trials import Trials, Verdict, busy
from slipstream.speculation.grammar import GrammarState

MAX_SCHEMA_BYTES = 1 << 20
MAX_HELD_BYTES = 1 << 30  # what the schemas of all open answers take, as their trials measured it
_KEPT_VERDICTS = 1024
_HEAVY_S = 0.1
_MAX_HEAVY = 8


class GrammarCompiler:
    """Compiles what answers must follow, after a trial in another process.

    Verdicts are kept, since clients repeat their schemas; so are refusals. Compiled schemas are not: llguidance's
    copies of a matcher share one lexer, whose size is limited, so one request could use up another's. Every request
    has a lexer of its own, and compiling for the second time takes a millisecond for a schema of ordinary size.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        source, ends = tokenizer.to_json(), tokenizer.eos_token_ids
        self._tokenizer = _readable(source, vocab_size, ends)  # holds Python's lock for a second: not later
        self._trials = Trials(source, vocab_size, ends)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Verdict]] = {}
        self._light = ThreadPoolExecutor(1, "schema")
        self._heavy = ThreadPoolExecutor(1, "large-schema")
        self._num_heavy = 0
        self._open: weakref.WeakKeyDictionary[JsonGrammar, int] = weakref.WeakKeyDictionary()

    async def compile(self, wanted: ResponseFormat | None) -> "JsonGrammar | None":
        """Return the grammar of a response format; None if any text will do."""
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return await self._compile('{"type": "object"}', "response_format")
        if wanted.json_schema is None:
            raise HttpError(
                400, "response_format of type json_schema needs a json_schema.", param="response_format.json_schema"
            )
        return await self._compile(json.dumps(wanted.json_schema.schema_), "response_format.json_schema.schema")

    def close(self) -> None:
        """End the process and the threads."""
        self._trials.close()
        self._light.shutdown(wait=False, cancel_futures=True)
        self._heavy.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, schema: str, field: str) -> "JsonGrammar":
        if len(schema) > MAX_SCHEMA_BYTES:
            raise HttpError(
                400, f"{field} has {len(schema)} bytes; {MAX_SCHEMA_BYTES} are the most a schema may have.", param=field
            )
        if isinstance(self._tokenizer, str):
            raise HttpError(
                400,
                f"JSON cannot be asked of this model: its tokenizer is of another kind ({self._tokenizer}).",
                param="response_format",
            )
        verdict = await self._verdict(schema)
        if verdict.problem is not None:
            raise HttpError(400, f"{field} {verdict.problem}", param=field)
        if sum(self._open.values()) + verdict.num_bytes > MAX_HELD_BYTES:
            raise busy()
        grammar = JsonGrammar(await self._built(verdict, self._tokenizer, schema), self._vocab_size)
        self._open[grammar] = verdict.num_bytes
        return grammar

    async def _verdict(self, schema: str) -> Verdict:
        """Return the verdict on a schema; those who ask for the same one at once share one trial."""
        key = hashlib.sha256(schema.encode()).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        if key not in self._under_way:
            task = asyncio.ensure_future(self._trials.attempt(schema))
            self._under_way[key] = task
            task.add_done_callback(lambda task: self._keep(key, task))
        return await asyncio.shield(self._under_way[key])

    def _keep(self, key: bytes, task: "asyncio.Task[Verdict]") -> None:
        del self._under_way[key]
        if not task.cancelled() and task.exception() is None and task.result().lasting:
            self._verdicts[key] = task.result()
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)

    async def _built(self, verdict: Verdict, tokenizer: LLTokenizer, schema: str) -> LLMatcher:
        """Compile a schema that passed, off the event loop; what takes long waits for its like only."""
        build = functools.partial(compile_schema, tokenizer, schema)
        loop = asyncio.get_running_loop()
        if verdict.compile_s < _HEAVY_S:
            return await loop.run_in_executor(self._light, build)
        if self._num_heavy >= _MAX_HEAVY:
            raise busy()
        self._num_heavy += 1
        try:
            return await loop.run_in_executor(self._heavy, build)
        finally:
            self._num_heavy -= 1


def _readable(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer | str:
    """Return llguidance's form of a tokenizer, or why it has none."""
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except ValueError as error:
        return str(error)


class JsonGrammar:
    """A request's compiled grammar; its answers share it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def start(self) -> GrammarState:
        """Return a fresh matcher."""
        return _Matcher(self._matcher, self._vocab_size)


class _Matcher:
    """llguidance's matcher; paths are tried and taken back. Where a limit stops it, that is a RequestError."""

    def __init__(self, beginning: LLMatcher, vocab_size: int) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._taken: list[int] = []
        self._vocab_size = vocab_size

    @property
    def finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow a path; None if the path itself breaks the grammar or ends it."""
        taken = self._matcher.try_consume_tokens(list(path))
        possible = taken == len(path) and not (path and self.finished)
        bits = np.frombuffer(self._matcher.compute_bitmask() if possible else b"", dtype=np.uint8)
        if self._matcher.is_error():
            error = self._error()
            # Errors stay, and this one may lie on a path that the target does not take: start again.
            self._matcher = self._beginning.deep_copy()
            self._matcher.consume_tokens(self._taken)
            raise error
        self._matcher.rollback(taken)
        if not possible:
            return None
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        for token in tokens:
            if not self.finished:
                self._matcher.consume_token(token)
                self._taken.append(token)
                if self._matcher.is_error():
                    raise self._error()

    def _error(self) -> RequestError:
        return RequestError(f"response_format cannot be followed any further: {reason(self._matcher)}")
