"""Copying: a request is drafted what followed an earlier occurrence of its text's ending, with the chance of that.

Each request has its text, a suffix automaton, beginning with some of earlier answers if that is asked for. How often
guesses after a match of some length are right is learned from every token of an answer, whether anything was drafted
there or not; what one request's answer says is where the next begins.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.kernels import CopyText, Ops, TextOps
from slipstream.kernels.reference.text import Text

_HOPES = (0.15, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)  # before anything was seen, by class of match
_HOPE_WEIGHT = 20.0  # guesses that counts for
_MEMORY = 0.9  # of what answers said, per answer
_BETWEEN = -2  # stands between two texts; no token


@dataclass
class _Copied:
    """A request's text, how much of it the automaton has, and where its answer begins."""

    text: CopyText
    num_before: int  # tokens of earlier answers, which come first
    tokens: Sequence[int] = ()
    num_prompt: int = 0


class Copier:
    """The texts of requests.

    Args:
        most: copied nodes of a tree, at most.
        num_earlier: tokens of earlier answers, the latest, that a request may copy from beside its own text.
    """

    def __init__(self, new_text: Callable[[Sequence[float]], CopyText], most: int, num_earlier: int = 0) -> None:
        self._new_text = new_text
        self.most, self._num_earlier = most, num_earlier
        self._copied: dict[int, _Copied] = {}
        self._tried, self._right = [0.0] * len(_HOPES), [0.0] * len(_HOPES)
        self._answers: deque[Sequence[int]] = deque()

    @staticmethod
    def on(ops: Ops, most: int, num_earlier: int = 0) -> "Copier":
        """Return one whose texts the kernels' rounds can read, where they have such."""
        return Copier(ops.copy_text if isinstance(ops, TextOps) else Text, most, num_earlier)

    def see(self, request_id: int, tokens: Sequence[int]) -> CopyText:
        """Take in what a request's text has grown by and return it.

        Args:
            tokens: all of them; the first time, up to where the answer begins or little further.
        """
        copied = self._copied.get(request_id)
        if copied is None:
            copied = self._copied[request_id] = self._begin(tokens)
            copied.text.extend(tokens, False)
            return copied.text
        copied.tokens = tokens
        num_new = len(tokens) - (copied.text.num_tokens - copied.num_before)
        if num_new > 0:
            copied.text.extend(tokens[len(tokens) - num_new :], True)
        return copied.text

    def forget(self, request_id: int) -> None:
        """Drop a request's text; what it said of guesses is kept, and its answer if later ones may copy it."""
        copied = self._copied.pop(request_id, None)
        if copied is None:
            return
        tried, right = copied.text.learned()
        self._tried = [_MEMORY * old + new for old, new in zip(self._tried, tried, strict=True)]
        self._right = [_MEMORY * old + new for old, new in zip(self._right, right, strict=True)]
        if self._num_earlier:
            self._answers.append([*copied.tokens[copied.num_prompt :], _BETWEEN])
            while len(self._answers) > 1 and sum(map(len, self._answers)) > self._num_earlier:
                self._answers.popleft()

    def _begin(self, tokens: Sequence[int]) -> _Copied:
        prior = [
            (right + _HOPE_WEIGHT * hope) / (tried + _HOPE_WEIGHT)
            for tried, right, hope in zip(self._tried, self._right, _HOPES, strict=True)
        ]
        text = self._new_text(prior)
        before = [token for answer in self._answers for token in answer][-self._num_earlier :] if self._answers else []
        text.extend(before, False)
        return _Copied(text, len(before), tokens, len(tokens))
