"""A stretch of one dimension of a stored tensor: all of it, or the part one rank keeps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Entries [start, stop) of `total`."""

    total: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop <= self.total, f"[{self.start}, {self.stop}) is not within {self.total}"

    @staticmethod
    def whole(total: int) -> "Span":
        """Return the span of everything."""
        return Span(total, 0, total)

    @property
    def size(self) -> int:
        """How many entries it has."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing is left out."""
        return self.size == self.total

    def times(self, count: int) -> "Span":
        """Return the same stretch where each entry stands for `count`, as a head does for its width."""
        return Span(self.total * count, self.start * count, self.stop * count)


Window = tuple[Span, ...]
"""A span for each dimension of a tensor."""
