"""From tokens to what a reader gets: text in whole characters, stop strings, and which tokens were drafted."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from slipstream.engine.request import FinishReason
from slipstream.executors.interface import TokenLogprob
from slipstream.speculation.statistics import AcceptanceStats

__all__ = ["Detokenizer", "Emission", "EmittedToken", "StopMatcher", "TokenLogprob"]


class Detokenizer(Protocol):
    """Turns a growing list of tokens into text, a whole character at a time."""

    def push(self, ids: Iterable[int]) -> str:
        """Take more tokens and return the text they complete."""
        ...

    def finish(self) -> str:
        """Return what is still held back."""
        ...


class EmittedToken(NamedTuple):
    """One token of an answer, the text it let out, and where on the draft's path it was guessed (0 = not drafted)."""

    token_id: int
    text: str
    draft_position: int
    logprob: TokenLogprob | None = None


class Emission(NamedTuple):
    """What one step gave one request.

    `stats` are the request's own so far; `tail` is text that waited for the end. `prompt_logprobs` come with the
    first emission if they were asked for: one for each token of the prompt, None for the first. `error` is what ended
    a request whose finish reason is ERROR: something about the request itself, which no other request noticed.
    `stop` is the stop string that ended it; `num_cached` counts the prompt's tokens that were found in the cache, and
    `num_preempted` how often the request lost its pages to others.
    """

    request_id: int
    prompt: tuple[int, ...]
    seed: int
    tokens: tuple[EmittedToken, ...]
    stats: AcceptanceStats
    finish_reason: FinishReason | None = None
    tail: str = ""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: Exception | None = None
    stop: str | None = None
    num_cached: int = 0
    num_preempted: int = 0

    @staticmethod
    def joined(emissions: "Sequence[Emission]") -> "Emission":
        """Return what several steps gave one request as one; only the first may have a prompt's log probabilities."""
        tokens = tuple(token for emission in emissions for token in emission.tokens)
        return emissions[-1]._replace(tokens=tokens, prompt_logprobs=emissions[0].prompt_logprobs)

    @property
    def text(self) -> str:
        """All text of this step."""
        return "".join(token.text for token in self.tokens) + self.tail


class StopMatcher:
    """Lets text through up to a stop string, holding back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self.found is not None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """Return the text that is safe to show; sets `found` to the first stop string that ends in `text`.

        Args:
            may_stop: whether one may; if not, what begins in this text may still end in a later one.
        """
        if not self._stops:
            return text
        known = len(self._held)
        self._held += text
        found = ((self._held.find(stop, max(known + 1 - len(stop), 0)), stop) for stop in self._stops)
        places = [(at, stop) for at, stop in found if at >= 0]
        if places and may_stop:
            first, self.found = min(places, key=lambda place: place[0])
            shown, self._held = self._held[:first], ""
            return shown
        keep = max(self._overlap(stop) for stop in self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """Return what was held back: the answer ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
