"""States that requests left behind for a draft that rested: kept with the pages they belong to, until they are wanted.

A draft that rests is late with a request's last tokens. When the request ends, its full pages stay known to the prefix
cache, with the target's keys but not all of the draft's. What the draft would need to write the rest, the target's
states and the token after each, waits here by page: a request that begins with such a page takes it up, a page given
to somebody else loses it, and most are never asked for.

Shape letters: L tokens, F the target's captured states of one token side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LateRun:
    """Neighbouring positions the draft has not followed: the first of them, the token after each, their states."""

    start: int
    tokens: Sequence[int]
    states_LF: Tensor

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + len(self.tokens)

    def part(self, start: int, end: int) -> "LateRun":
        """Return some of the positions."""
        rows = slice(start - self.start, end - self.start)
        return LateRun(start, self.tokens[rows], self.states_LF[rows])

    def copied(self) -> "LateRun":
        """Return the same with the states in memory of their own."""
        return LateRun(self.start, self.tokens, self.states_LF.clone())


class LatePages:
    """What is late in pages nobody may hold any more; its memory is bounded by `max_bytes`, and by the pages."""

    def __init__(self, page_size: int, max_bytes: int) -> None:
        self._page_size = page_size
        self._max_bytes = max_bytes
        self._runs: dict[int, LateRun] = {}
        self.num_bytes = 0

    def leave(self, pages: Sequence[int], run: LateRun) -> bool:
        """Keep what is late in a request's pages, position by position; False (and nothing kept) if there is no room.

        Args:
            pages: all pages of the request, the first with position 0.
        """
        if self.num_bytes + run.states_LF.nbytes > self._max_bytes:
            return False
        for index in range(run.start // self._page_size, -(-run.end // self._page_size)):
            begin = index * self._page_size
            self.lose(pages[index])
            part = run.part(max(begin, run.start), min(begin + self._page_size, run.end))
            self._runs[pages[index]] = part.copied()
            self.num_bytes += part.states_LF.nbytes
        return True

    def lose(self, page: int) -> LateRun | None:
        """Drop what is late in a page, which has other content from now on; return it."""
        run = self._runs.pop(page, None)
        if run is not None:
            self.num_bytes -= run.states_LF.nbytes
        return run

    def take_up(self, pages: Sequence[int], length: int) -> list[LateRun]:
        """Hand over what is late in the first `length` positions of pages, neighbours together, in their order."""
        if not self._runs:
            return []
        found = (self.lose(page) for page in pages[: length // self._page_size])
        return list(_joined([run for run in found if run is not None]))


def _joined(runs: Sequence[LateRun]) -> Iterator[LateRun]:
    begin = 0
    for index, run in enumerate(runs, 1):
        if index < len(runs) and runs[index].start == run.end:
            continue
        group = runs[begin:index]
        tokens = [token for one in group for token in one.tokens]
        yield LateRun(group[0].start, tokens, torch.cat([one.states_LF for one in group]))
        begin = index
