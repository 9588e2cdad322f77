"""Answers in the form of SGLang's `/generate`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.output import TokenLogprob
from slipstream.engine.request import FinishReason
from slipstream.serve.answers import Tally, stopped_by
from slipstream.serve.errors import HttpError, aborted
from slipstream.serve.sglang.request import GenerateRequest
from slipstream.serve.stream import DONE, Json, server_sent_event
from slipstream.serve.ticket import StepEvent
from slipstream.serve.tools.form import without_marks

Entry = tuple[float | None, int, str | None]


@dataclass(frozen=True)
class Asked:
    """What one answer was asked for beside its text.

    Args:
        start: where in the prompt its log probabilities begin; None for none.
        drop_answer: only the prompt is scored; the one token the engine makes is not shown.
    """

    name: str
    logprobs: int | None = None
    start: int | None = None
    drop_answer: bool = False


class GenerateWriter:
    """Writes one request's answers; every event of a stream holds all of its answer so far, as SGLang's do."""

    def __init__(self, body: GenerateRequest, asked: Sequence[Asked], tokenizer: Tokenizer) -> None:
        self._body = body
        self._asked = asked
        self._tokenizer = tokenizer
        self._started = time.monotonic()
        self._events: list[list[StepEvent]] = [[] for _ in asked]

    @property
    def tells_of_aborts(self) -> bool:
        """Whether an answer that was called off has a form of its own: how far it came, and that it was."""
        return True

    @property
    def streams(self) -> bool:
        """Whether the answer goes out in parts."""
        return bool(self._body.stream)

    def whole(self, tallies: Sequence[Tally], events: Sequence[Sequence[StepEvent]]) -> Json | list[Json]:
        """Return an answer that is not streamed: a list where several were asked for."""
        for tally, own in zip(tallies, events, strict=True):
            for event in own:
                tally.read(event)
        answers = [
            self._answer(asked, tally, own) for asked, tally, own in zip(self._asked, tallies, events, strict=True)
        ]
        return answers if self._is_list else answers[0]

    def part(self, index: int, tallies: Sequence[Tally], event: StepEvent) -> bytes:
        """Return an answer so far; with several it says which one it is."""
        own = self._events[index]
        own.append(event)
        tallies[index].read(event)
        answer = self._answer(self._asked[index], tallies[index], own)
        return server_sent_event(answer | ({"index": index} if self._is_list else {}))

    def end(self, tallies: Sequence[Tally]) -> bytes:
        """Return the word that a stream is over."""
        return DONE

    def failure(self, error: HttpError) -> bytes:
        """Return how a stream that has begun ends with an error."""
        return server_sent_event(error.body()) + DONE

    @property
    def _is_list(self) -> bool:
        return self._body.is_batch or len(self._asked) > 1

    def _answer(self, asked: Asked, tally: Tally, events: Sequence[StepEvent]) -> Json:
        tokens = [] if asked.drop_answer else [token for event in events for token in event.tokens]
        meta: Json = {
            "id": asked.name,
            "finish_reason": self._finish(asked, tally, events[-1]),
            "prompt_tokens": len(tally.job.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": tally.num_cached,
            "reasoning_tokens": tally.num_reasoning,
            "e2e_latency": time.monotonic() - self._started,
        }
        if (stats := events[-1].stats) is not None and stats.drafted:
            meta["spec_verify_ct"] = stats.passes
            meta["spec_accept_length"] = stats.acceptance_length
        if asked.logprobs is not None:
            meta["output_token_logprobs"] = [self._entry(token.logprob) for token in tokens if token.logprob]
            scored = self._scored(asked, events)
            meta["input_token_logprobs"] = [
                (None, tally.job.prompt[at], self._text(tally.job.prompt[at])) if one is None else self._entry(one)
                for at, one in scored
            ]
            if asked.logprobs:
                meta["output_top_logprobs"] = [self._top(token.logprob) for token in tokens if token.logprob]
                meta["input_top_logprobs"] = [None if one is None else self._top(one) for _, one in scored]
        answer: Json = {
            "text": "" if asked.drop_answer else without_marks("".join(event.text for event in events)),
            "output_ids": [token.token_id for token in tokens],
            "meta_info": meta,
        }
        if self._body.return_prompt_token_ids:
            answer["prompt_token_ids"] = list(tally.job.prompt)
        return answer

    def _finish(self, asked: Asked, tally: Tally, last: StepEvent) -> Json | None:
        if last.finish_reason is None:
            return None
        if last.finish_reason is FinishReason.ABORT:
            return {"type": "abort", "message": str(aborted()), "status_code": None, "err_type": None}
        if last.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": 0 if asked.drop_answer else tally.num_tokens}
        return {"type": "stop", "matched": stopped_by(tally.job, last, self._tokenizer.eos_token_ids)}

    def _scored(self, asked: Asked, events: Sequence[StepEvent]) -> list[tuple[int, TokenLogprob | None]]:
        """Return the prompt's log probabilities by place, from where they were asked for; the first has none."""
        given = events[0].prompt_logprobs
        if given is None or asked.start is None:
            return []
        places = list(enumerate(given))[asked.start :]
        return [(places[0][0], None), *places[1:]] if places else []

    def _entry(self, scored: TokenLogprob) -> Entry:
        return scored.logprob, scored.token_id, self._text(scored.token_id)

    def _top(self, scored: TokenLogprob) -> list[Entry]:
        return [(value, token, self._text(token)) for token, value in scored.top]

    def _text(self, token: int) -> str | None:
        return self._tokenizer.token_text(token) if self._body.return_text_in_logprobs else None
