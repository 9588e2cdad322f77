"""A request's text as a suffix automaton, in plain Python; kernels/cpu/native/text.h is the same in C++.

A state stands for pieces of the text that end at the same places. It knows where the last of them seen ended, so what
follows there is a guess at what follows now.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.kernels.texts import MATCH_LENGTHS, CopiedRun, Learned

_PRIOR_WEIGHT = 4.0  # guesses that what was seen elsewhere counts for
_MEMORY = 0.97  # of guesses, per guess of the same class
_REFRESHED = 8  # endings whose last occurrence is moved on with each token, the longest first
_MAX_NODES = 64  # of a tree, its root included


@dataclass
class _State:
    length: int
    link: int
    end: int
    edges: dict[int, int] = field(default_factory=dict)


class Text:
    """The specification of `CopyText`."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = list(prior)
        self._tried, self._right = [0.0] * len(MATCH_LENGTHS), [0.0] * len(MATCH_LENGTHS)
        self._tokens: list[int] = []
        self._states = [_State(0, -1, 0)]
        self._last = 0

    @property
    def num_tokens(self) -> int:
        """Tokens taken in."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int], learns: bool) -> None:
        """Take in tokens that follow."""
        states = self._states
        for token in tokens:
            state, length = self._ending()
            if learns and length > 0:
                index = _class_of(length)
                self._tried[index] = _MEMORY * self._tried[index] + 1
                right = self._follower(state, 0, ()) == token
                self._right[index] = _MEMORY * self._right[index] + right
            # Only now do the ending's own states say where the text ends: until here they named an earlier occurrence.
            state = self._last
            for _ in range(_REFRESHED):
                if state <= 0:
                    break
                states[state].end = len(self._tokens)
                state = states[state].link
            self._add(token)

    def copy(self, path: Sequence[int], most: int, least: float) -> CopiedRun:
        """Return what followed the last earlier occurrence of the text's ending and then `path`."""
        state, length = self._ending()
        for token in path:
            state, length = self._then(state, length, token)
        run = CopiedRun([], [])
        chance, drafted = 1.0, list(path)
        while len(run.tokens) < most and len(drafted) < _MAX_NODES - 1 and length > 0:
            token = self._follower(state, len(run.tokens), drafted)
            chance *= self._chance(length + len(run.tokens))
            if token < 0 or chance < least:
                break
            drafted.append(token)
            run.tokens.append(token)
            run.chances.append(chance)
        return run

    def learned(self) -> Learned:
        """Return what answers have said of guesses."""
        return Learned(self._tried[:], self._right[:])

    def _ending(self) -> tuple[int, int]:
        """Return the longest ending of the text that occurred before: its state and its length."""
        link = self._states[self._last].link
        return (0, 0) if link < 0 else (link, self._states[link].length)

    def _then(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest ending that occurred, one token after a match."""
        while token not in self._states[state].edges:
            state = self._states[state].link
            if state < 0:
                return 0, 0
            length = self._states[state].length
        return self._states[state].edges[token], length + 1

    def _follower(self, state: int, step: int, drafted: Sequence[int]) -> int:
        place = self._states[state].end + step
        if place < len(self._tokens):
            return self._tokens[place]
        return drafted[place - len(self._tokens)] if place - len(self._tokens) < len(drafted) else -1

    def _chance(self, length: int) -> float:
        index = _class_of(length)
        return (self._right[index] + _PRIOR_WEIGHT * self._prior[index]) / (self._tried[index] + _PRIOR_WEIGHT)

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        end, states = len(self._tokens), self._states
        states.append(_State(end, 0, end))
        state, place = len(states) - 1, self._last
        self._last = state
        while place >= 0 and token not in states[place].edges:
            states[place].edges[token] = state
            place = states[place].link
        if place < 0:
            return
        to = states[place].edges[token]
        if states[to].length == states[place].length + 1:
            states[state].link = to
            return
        clone = len(states)
        states.append(_State(states[place].length + 1, states[to].link, states[to].end, dict(states[to].edges)))
        while place >= 0 and states[place].edges.get(token) == to:
            states[place].edges[token] = clone
            place = states[place].link
        states[to].link = states[state].link = clone


def _class_of(length: int) -> int:
    return bisect_right(MATCH_LENGTHS, length) - 1
