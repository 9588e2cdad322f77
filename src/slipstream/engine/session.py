"""A request's companion on the host: its text so far, where it stops, its acceptance statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.engine.output import Detokenizer, Emission, EmittedToken, StopMatcher
from slipstream.engine.request import FinishReason, Request
from slipstream.executors.interface import RowOutput
from slipstream.speculation.statistics import AcceptanceStats


class Session:
    """What the engine keeps beside a request's plain values.

    What a request brings with it (stop strings, tokenizer) is used here; if that raises, the request's next emission
    is its last, and the other requests of the step go on.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.stats = AcceptanceStats()
        self._failure: Exception | None = None
        self._detokenizer = detokenizer
        self._stop = StopMatcher(request.params.stop)

    def emit(self, row: RowOutput, room: int, totals: AcceptanceStats) -> Emission:
        """Turn what a step gave into what the reader gets; a request that fails gets its last emission.

        Args:
            room: tokens that still fit the context.
            totals: the engine's own statistics, which count this pass too.
        """
        self._failure = self._failure or row.failure
        if self._failure is None:
            with self._contained():
                return self._emit(row, room, totals)
        request = self.request
        return Emission(
            request.request_id, request.prompt, request.seed, (), self.stats, FinishReason.ERROR, error=self._failure
        )

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Keep what goes wrong with this request's own data to this request."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (kept as the request's failure, and handed to whoever asked for it)
            self._failure = self._failure or error

    def _emit(self, row: RowOutput, room: int, totals: AcceptanceStats) -> Emission:
        """Turn a step's tokens into text, cut where the answer ends."""
        params = self.request.params
        allowed = min(params.max_tokens - self.request.num_output, room)
        emitted: list[EmittedToken] = []
        reason: FinishReason | None = None
        last = len(row.tokens)
        for position, token in enumerate(row.tokens, start=1):
            text = self._text(token, self.request.num_output + position)
            logprob = None if row.logprobs is None else row.logprobs[position - 1]
            emitted.append(EmittedToken(token, text, position if position < last else 0, logprob))
            if token in self.request.end_tokens or self._stop.stopped or (row.finished and position == last):
                reason = FinishReason.STOP
            elif len(emitted) == allowed:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        tail = "" if reason is None or self._detokenizer is None else self._finish_text()
        accepted = sum(token.draft_position > 0 for token in emitted)
        request = self.request
        for stats in (self.stats, totals):
            stats.record(row.drafted, len(emitted), accepted, first=request.num_output == 0)
        scored = None if request.num_output else row.prompt_logprobs
        return Emission(
            request.request_id,
            request.prompt,
            request.seed,
            tuple(emitted),
            self.stats,
            reason,
            tail,
            None if scored is None else tuple(scored),
            stop=self._stop.found,
            num_cached=request.num_cached,
            num_preempted=request.num_preempted,
        )

    def _text(self, token: int, place: int) -> str:
        """Return the text that the answer's token at a place, from 1 on, lets out; an end token has none."""
        if self._detokenizer is None or token in self.request.end_tokens:
            return ""
        return self._stop.feed(self._detokenizer.push([token]), place > self.request.params.min_tokens)

    def _finish_text(self) -> str:
        assert self._detokenizer is not None
        if self._stop.stopped:
            return ""
        return self._stop.feed(self._detokenizer.finish()) + ("" if self._stop.stopped else self._stop.finish())
