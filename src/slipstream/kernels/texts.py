"""What a text gives to copy from: what followed an earlier occurrence of its ending, and how likely that is right."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

MATCH_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 16, 32)
"""The shortest match of each class; guesses after matches of one class are about as often right."""


class CopiedRun(NamedTuple):
    """Tokens that may follow, and each one's chance that it and all before it are right."""

    tokens: list[int]
    chances: list[float]


class Learned(NamedTuple):
    """How many guesses were tried and were right, by class of match, old ones fading."""

    tried: list[float]
    right: list[float]


class CopyText(Protocol):
    """A text that grows, with every place its ending occurred before."""

    @property
    def num_tokens(self) -> int:
        """Tokens taken in."""
        ...

    def extend(self, tokens: Sequence[int], learns: bool) -> None:
        """Take in tokens that follow.

        Args:
            learns: they are an answer's, and so say how often guesses are right.
        """
        ...

    def copy(self, path: Sequence[int], most: int, least: float) -> CopiedRun:
        """Return what followed the last earlier occurrence of the text's ending and then `path`.

        A run that reaches the text's end reads on into `path` and itself, so a repetition is continued.

        Args:
            path: tokens assumed behind the text; with the run they are fewer than a tree has nodes.
            most: so many tokens at most.
            least: of the chance, below which the run ends.
        """
        ...

    def learned(self) -> Learned:
        """Return what answers have said of guesses."""
        ...


@runtime_checkable
class TextOps(Protocol):
    """A backend with texts of its own, which its rounds read and extend."""

    def copy_text(self, prior: Sequence[float]) -> CopyText:
        """Return an empty text; `prior` is how often guesses were right elsewhere, by class of match."""
        ...
