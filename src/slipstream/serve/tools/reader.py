"""Text that is still arriving, read as if it were all there: parsers are generators that wait where it ends for now."""

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""What a reading function returns: `yield from` it for its value; it yields whenever more text must come first."""
Sink = Callable[[str], None]

TOKEN_MARK = "\ufdd0"
"""Stands before a marker that came as one special token; text that merely spells it has none (`detokenizer.py`)."""
_SPACE = " \t\r\n"
_NO_NAME = _SPACE + TOKEN_MARK + '"<>|{'


class Reader:
    """The text of one answer from where its parser stands, and whether more will come.

    Args:
        tokens: markers that are special tokens of this model; the same letters written as ordinary text are text.
    """

    def __init__(self, tokens: Collection[str] = ()) -> None:
        self._tokens = tuple(tokens)
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False
        self.exhausted = False
        """Whether something was looked for beyond the end of the text."""

    def push(self, text: str) -> None:
        """Add text that has arrived."""
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """Take note that no more will come."""
        self._ended = True

    def mark(self) -> None:
        """Keep what is read from here on, so that `back` can return to it."""
        self._mark = self._at

    def release(self) -> None:
        """Keep no longer."""
        self._mark = None

    def back(self) -> None:
        """Return to the mark, and release it."""
        assert self._mark is not None, "there is a mark to return to"
        self._at = self._mark
        self._mark = None

    def drop(self) -> None:
        """Pass everything that has arrived."""
        self._at = len(self._text)

    def until(self, markers: Sequence[str], sink: Sink, keep_partial: bool = True) -> Waiting[str | None]:
        """Hand text to `sink` up to the first of some markers, and pass it; None if the text ends without one.

        No marker begins with another. Without `keep_partial`, the beginning of a marker that the text ends with is
        taken for a part of it.
        """
        spelled = {self._spelled(marker): marker for marker in markers}
        while True:
            rest = self._text[self._at :]
            at, found = min(((at, m) for m in spelled if (at := rest.find(m)) >= 0), default=(-1, ""))
            if at >= 0:
                self._give(at, sink)
                self._at += len(found)
                return spelled[found]
            partial = max((_overlap(rest, m) for m in spelled), default=0)
            self._give(len(rest) - (0 if self._ended and keep_partial else partial), sink)
            if self._ended:
                self.exhausted = True
                self.drop()
                return None
            yield

    def text_until(self, *markers: str) -> Waiting[str | None]:
        """Return the text up to the first of some markers, which is passed; None if it ends without one."""
        parts: list[str] = []
        found = yield from self.until(markers, parts.append)
        return None if found is None else "".join(parts)

    def starts(self, *options: str) -> Waiting[str | None]:
        """Pass one of some texts if it comes next, and return it; else None."""
        spelled = {self._spelled(option): option for option in options}
        while True:
            rest = self._text[self._at :]
            if (found := next((o for o in spelled if rest.startswith(o)), None)) is not None:
                self._at += len(found)
                return spelled[found]
            possible = any(o.startswith(rest) for o in spelled)
            if self._ended or not possible:
                self.exhausted = self.exhausted or possible
                return None
            yield

    def spaces(self) -> Waiting[str]:
        """Pass white space, and return it."""
        parts: list[str] = []
        while True:
            rest = self._text[self._at :]
            self._give(len(rest) - len(rest.lstrip(_SPACE)), parts.append)
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def name(self) -> Waiting[str]:
        """Pass the characters that a function's name may have, and return them."""
        parts: list[str] = []
        while True:
            rest = self._text[self._at :]
            end = next((place for place, char in enumerate(rest) if char in _NO_NAME), len(rest))
            self._give(end, parts.append)
            if end < len(rest):
                return "".join(parts)
            if self._ended:
                self.exhausted = True
                return "".join(parts)
            yield

    def unread(self, text: str) -> None:
        """Go back before a text that was just passed; nothing was waited for since."""
        self._at -= len(self._spelled(text))

    def json_value(self, sink: Sink, at_most: int | None = None) -> Waiting[bool]:
        """Hand one JSON value to `sink`, as it is written; whether it came to its end, within `at_most` characters.

        What stands between its brackets and quotes is not looked at, so that faults in it reach the client as they are.
        """
        scan = _JsonScan()
        given = 0
        while True:
            rest = self._text[self._at :]
            end = scan.end(rest)
            given += len(rest) if end is None else end
            self._give(len(rest) if end is None else end, sink)
            if end is not None:
                return True
            if self._ended or (at_most is not None and given > at_most):
                self.exhausted = self._ended
                return self._ended and scan.is_number
            yield

    def _spelled(self, marker: str) -> str:
        for token in self._tokens:
            marker = marker.replace(token, TOKEN_MARK + token)
        return marker

    def _give(self, count: int, sink: Sink) -> None:
        if count:
            sink(self._text[self._at : self._at + count])
            self._at += count


def drop(_text: str) -> None:
    """Take text that belongs to the syntax."""


class _JsonScan:
    """Where a JSON value ends, found while it arrives."""

    def __init__(self) -> None:
        self.is_number = False  # or true, false, null: what ends where something else begins
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Return the place after the value's last character if it lies in this piece of text."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if self._depth == 0:
                        return place + 1
            elif self.is_number:
                if char in ",]}" or char in _SPACE:
                    return place
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1 if self._depth == 0 else place
            elif self._depth == 0 and char not in _SPACE:
                self.is_number = True
        return None


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text begin a marker."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
