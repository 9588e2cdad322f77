"""Control tokens that a user's text merely spells (`<|im_end|>`): marked before a chat is rendered, read as text after.

A template writes its own control tokens and the user's text into one string, so which is which must be marked before.
The mark is a character that no text may hold, in front of every token that is spelled; templates pass it on.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_MARK = "\ufdd1"  # a noncharacter: Unicode keeps it out of texts
_REPLACEMENT = "\ufffd"


class SpelledTokens:
    """The added tokens of a tokenizer, and a tokenizer that knows none of them."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._ids = {token.content: i for i, token in fast.get_added_tokens_decoder().items()}
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        settings = json.loads(fast.to_str()) | {"added_tokens": [], "post_processor": None}
        self._first = self._later = FastTokenizer.from_str(json.dumps(settings))
        if _without_space(settings.get("pre_tokenizer") or {}):
            self._later = FastTokenizer.from_str(json.dumps(settings))

    def marked(self, value: Any, allowed: Collection[str] = ()) -> Any:  # any JSON value
        """Return a JSON value with a mark in front of every token its strings spell, but for those that are allowed."""
        if isinstance(value, str):
            text = value.replace(_MARK, _REPLACEMENT)
            return self._pattern.sub(lambda found: found[0] if found[0] in allowed else _MARK + found[0], text)
        if isinstance(value, Mapping):
            return {self.marked(key, allowed): self.marked(item, allowed) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.marked(item, allowed) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text; marked tokens are read as the letters they consist of."""
        ids: list[int] = []
        begin = 0  # of what the tokenizer itself may read
        for start, end in self._marked_runs(text):
            ids += self._fast.encode(text[begin:start], add_special_tokens=False).ids
            ids += self._as_text(text[start:end], is_first=start == 0)
            begin = end
        return [*ids, *self._fast.encode(text[begin:], add_special_tokens=False).ids]

    def _marked_runs(self, text: str) -> list[tuple[int, int]]:
        """Return where text between two real tokens holds marks."""
        runs: list[tuple[int, int]] = []
        start = 0
        real = [found.span() for found in self._pattern.finditer(text) if text[found.start() - 1 :][:1] != _MARK]
        for token_start, token_end in [*real, (len(text), len(text))]:
            if _MARK in text[start:token_start]:
                runs.append((start, token_start))
            start = token_end
        return runs

    def _as_text(self, run: str, is_first: bool) -> list[int]:
        plain = self._first if is_first else self._later
        ids: list[int] = plain.encode(run.replace(_MARK, ""), add_special_tokens=False).ids
        if not set(ids).isdisjoint(self._ids.values()):
            # The vocabulary itself has the token as a piece: it is broken behind its first letter.
            pieces = re.split(f"{_MARK}(.)", run, flags=re.DOTALL)
            ids = [i for piece in pieces for i in plain.encode(piece, add_special_tokens=False).ids]
        return ids


def mark_in(text: str) -> bool:
    """Tell whether a rendered text has marks."""
    return _MARK in text


def _without_space(pre_tokenizer: dict[str, Any]) -> bool:
    """Have no space put in front of a text, which something else precedes; whether one was."""
    changed = False
    for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
            changed = True
    return changed
