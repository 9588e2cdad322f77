"""JSON answers: `response_format` compiled by llguidance, and its matcher walked along the paths of a tree."""

import functools
import json
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.serve.errors import HttpError
from slipstream.serve.protocol import ResponseFormat
from slipstream.speculation.grammar import Grammar, GrammarState

# Unbounded white space between tokens is valid JSON, and small models fill an answer with it.
_OPTIONS = {"whitespace_pattern": r"[\x20\x0A]{0,8}"}
_KEPT_GRAMMARS = 64


class GrammarCompiler:
    """Compiles what answers must follow; keeps the last few, since clients repeat their schemas."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._compiled = functools.lru_cache(_KEPT_GRAMMARS)(self._compile)

    def compile(self, wanted: ResponseFormat | None) -> Grammar | None:
        """Return the grammar of a response format; None if any text will do."""
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return self._compiled('{"type": "object"}', "response_format")
        if wanted.json_schema is None:
            raise HttpError(
                400, "response_format of type json_schema needs a json_schema.", param="response_format.json_schema"
            )
        return self._compiled(json.dumps(wanted.json_schema.schema_), "response_format.json_schema.schema")

    def _compile(self, schema: str, field: str) -> "JsonGrammar":
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise HttpError(400, f"{field}: {error}", param=field) from error
        problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise HttpError(400, f"{field} cannot be followed: {problem}", param=field)
        return JsonGrammar(self._tokenizer, grammar, self._vocab_size)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        ends = list(self._source.eos_token_ids) or None
        try:
            return LLTokenizer(self._source.to_json(), n_vocab=self._vocab_size, eos_token=ends)
        except ValueError as error:
            raise HttpError(
                400,
                f"JSON cannot be asked of this model: its tokenizer is of another kind ({error}).",
                param="response_format",
            ) from error


class JsonGrammar:
    """A compiled grammar."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._vocab_size = vocab_size

    def start(self) -> GrammarState:
        """Return a fresh matcher."""
        return _Matcher(LLMatcher(self._tokenizer, self._grammar, log_level=0), self._vocab_size)


class _Matcher:
    """llguidance's matcher; paths are tried and taken back."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow a path; None if the path itself breaks the grammar or ends it."""
        taken = self._matcher.try_consume_tokens(list(path))
        try:
            if taken < len(path) or (path and self.finished):
                return None
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        finally:
            self._matcher.rollback(taken)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        for token in tokens:
            if not self.finished:
                taken = self._matcher.consume_token(token)
                assert taken, f"token {token} was emitted against the grammar: {self._matcher.get_error()}"
