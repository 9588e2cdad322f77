"""A grammar whose every position allows a third of the vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiny import VOCAB


class Residues:
    """Token i of the answer must be i modulo 3, and the answer has at most `length` tokens."""

    def __init__(self, length: int) -> None:
        self._length = length

    def start(self) -> "_State":
        return _State(self._length)


class _State:
    def __init__(self, length: int) -> None:
        self._length = length
        self._taken: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self._taken) >= self._length

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        text = [*self._taken, *path]
        if any(token % 3 != index % 3 for index, token in enumerate(text)):
            return None
        return torch.arange(VOCAB) % 3 == len(text) % 3

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token % 3 == len(self._taken) % 3, "a token that breaks the grammar was emitted"
            self._taken.append(token)
