"""llguidance's matcher, walked along the paths of drafted trees."""

from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from slipstream.errors import RequestError
from slipstream.serve.grammar_trial import reason


class Matcher:
    """Where an answer stands; paths are tried and taken back. Where a limit stops it, that is a RequestError."""

    def __init__(self, beginning: LLMatcher, vocab_size: int, field: str) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._taken: list[int] = []
        self._vocab_size = vocab_size
        self._field = field

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
            self._restart()
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

    def _restart(self) -> None:
        """Leave an error state: llguidance's stay, and this one may lie on a path that the target does not take."""
        self._matcher = self._beginning.deep_copy()
        self._matcher.consume_tokens(self._taken)

    def _error(self) -> RequestError:
        return RequestError(f"{self._field} cannot be followed any further: {reason(self._matcher)}")
