"""Answers in a given form: grammars compiled by llguidance, after a trial in another process."""

import asyncio
import functools
import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.serve.errors import HttpError
from slipstream.serve.grammar_trial import GrammarSource, compile_grammar
from slipstream.serve.matcher import Matcher
from slipstream.serve.structured import Constraint
from slipstream.serve.trials import Trials, Verdict, busy
from slipstream.speculation.grammar import GrammarState

MAX_SCHEMA_BYTES = 1 << 20  # of a grammar, too
MAX_HELD_BYTES = 1 << 30  # what the grammars of all open answers take, as their trials measured it
_KEPT_VERDICTS = 1024
_HEAVY_S = 0.1
_MAX_HEAVY = 8


class GrammarCompiler:
    """Compiles what answers must follow, after a trial in another process.

    Verdicts are kept, since clients repeat their grammars; so are refusals. Compiled grammars are not: llguidance's
    copies of a matcher share one lexer, whose size is limited, so one request could use up another's. Every request
    has a lexer of its own, and compiling for the second time takes a millisecond for a schema of ordinary size.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        source, ends = tokenizer.to_json(), tokenizer.eos_token_ids
        self._tokenizer = _readable(source, vocab_size, ends)  # holds Python's lock for a second: not later
        self._trials = Trials(source, vocab_size, ends)
        self._executor = LLExecutor()  # threads that make the masks of a step
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Verdict]] = {}
        self._light = ThreadPoolExecutor(1, "schema")
        self._heavy = ThreadPoolExecutor(1, "large-schema")
        self._num_heavy = 0
        self._open: weakref.WeakKeyDictionary[CompiledGrammar, int] = weakref.WeakKeyDictionary()

    async def compile(self, constraint: Constraint | None) -> "CompiledGrammar | None":
        """Return the grammar of a constraint; None if any text will do."""
        if constraint is None:
            return None
        source, field = constraint.source, constraint.field
        if source.body is not None:
            await self.check(Constraint(source.body, field))
        tokenizer, verdict = await self.check(constraint)
        if sum(self._open.values()) + verdict.num_bytes > MAX_HELD_BYTES:
            raise busy()
        matcher = await self._built(verdict, tokenizer, source)
        grammar = CompiledGrammar(matcher, self._vocab_size, field, self._executor)
        self._open[grammar] = verdict.num_bytes
        return grammar

    async def check(self, constraint: Constraint) -> tuple[LLTokenizer, Verdict]:
        """Raise HttpError unless a grammar passes its trial; returns the verdict, and the tokenizer it is for."""
        source, field = constraint.source, constraint.field
        if len(source.text) > MAX_SCHEMA_BYTES:
            raise HttpError(
                400,
                f"{field} has {len(source.text)} bytes; {MAX_SCHEMA_BYTES} are the most a schema or grammar may have.",
                param=field,
            )
        if isinstance(self._tokenizer, str):
            raise HttpError(
                400,
                f"Answers of a given form cannot be asked of this model: its tokenizer is of another kind "
                f"({self._tokenizer}).",
                param=field,
            )
        verdict = await self._verdict(source)
        if verdict.problem is not None:
            raise HttpError(400, f"{field} {verdict.problem}", param=field)
        return self._tokenizer, verdict

    def close(self) -> None:
        """End the process and the threads."""
        self._trials.close()
        self._light.shutdown(wait=False, cancel_futures=True)
        self._heavy.shutdown(wait=False, cancel_futures=True)

    async def _verdict(self, source: GrammarSource) -> Verdict:
        """Return the verdict on a grammar; those who ask for the same one at once share one trial."""
        key = hashlib.sha256(repr(source).encode(errors="surrogatepass")).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        if key not in self._under_way:
            task = asyncio.ensure_future(self._trials.attempt(source))
            self._under_way[key] = task
            task.add_done_callback(lambda task: self._keep(key, task))
        return await asyncio.shield(self._under_way[key])

    def _keep(self, key: bytes, task: "asyncio.Task[Verdict]") -> None:
        del self._under_way[key]
        if not task.cancelled() and task.exception() is None and task.result().lasting:
            self._verdicts[key] = task.result()
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)

    async def _built(self, verdict: Verdict, tokenizer: LLTokenizer, source: GrammarSource) -> LLMatcher:
        """Compile a grammar that passed, off the event loop; what takes long waits for its like only."""
        build = functools.partial(compile_grammar, tokenizer, source)
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


class CompiledGrammar:
    """A request's compiled grammar; its answers share it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, field: str, executor: LLExecutor) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field
        self._executor = executor

    def start(self) -> GrammarState:
        """Return a fresh matcher."""
        return Matcher(self._matcher, self._vocab_size, self._field, self._executor)
