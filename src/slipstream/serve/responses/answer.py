"""Answers in the form of OpenAI's Responses, whole or as a stream of events."""

from collections.abc import Callable, Iterator, Sequence

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.request import FinishReason
from slipstream.serve.answers import Tally
from slipstream.serve.errors import HttpError
from slipstream.serve.logprobs import LogprobWriter
from slipstream.serve.responses.namespaces import grouped_names
from slipstream.serve.responses.output import Output
from slipstream.serve.responses.request import ResponsesRequest
from slipstream.serve.stream import Json, server_sent_event
from slipstream.serve.ticket import StepEvent
from slipstream.serve.tools.events import ContentDelta


class ResponseWriter:
    """Writes one response. A whole one is what a stream's last event holds."""

    def __init__(
        self, body: ResponsesRequest, head: Json, tokenizer: Tokenizer, finished: Callable[[Json], None]
    ) -> None:
        """Keep what the response begins with.

        Args:
            head: id, created_at and model, and what else is said of every answer.
            finished: called with the response when it is complete.
        """
        self._body = body
        self._head = head
        self._scores = None if body.logprobs is None else LogprobWriter(tokenizer, as_ids=False)
        self._finished = finished
        self._output = Output(grouped_names(body.tools or ()))
        self._scored: list[Json] = []
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._num_events = 0

    @property
    def tells_of_aborts(self) -> bool:
        """Whether an answer that was called off has a form of its own; it ends with an error here."""
        return False

    @property
    def streams(self) -> bool:
        """Whether the answer goes out in parts."""
        return self._body.stream

    def whole(self, tallies: Sequence[Tally], events: Sequence[Sequence[StepEvent]]) -> Json:
        """Return a response that is not streamed."""
        for event in events[0]:
            for _ in self._events(tallies[0], event):
                pass
        return self._complete(tallies[0], events[0][-1])

    def part(self, index: int, tallies: Sequence[Tally], event: StepEvent) -> bytes:
        """Return what a stream says of a step, and with the last one the whole response."""
        tally = tallies[index]
        sent: list[Json] = []
        if not tally.started:
            tally.started = True
            begun = self._response(tally, "in_progress")
            sent += [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        sent += self._events(tally, event)
        if event.finish_reason is not None:
            response = self._complete(tally, event)
            sent.append({"type": f"response.{response['status']}", "response": response})
        return b"".join(map(self._sent, sent))

    def end(self, tallies: Sequence[Tally]) -> bytes:
        """Return nothing more: the last event says that it is over."""
        return b""

    def failure(self, error: HttpError) -> bytes:
        """Return how a stream that has begun ends with an error."""
        said = error.body()["error"]
        return self._sent({"type": "error", "code": str(said["code"]), "message": str(error), "param": error.param})

    def _sent(self, event: Json) -> bytes:
        numbered = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return server_sent_event(numbered, event["type"])

    def _events(self, tally: Tally, event: StepEvent) -> Iterator[Json]:
        self._tokens += [token.token_id for token in event.tokens]
        if self._scores is not None:
            self._scored += self._scores.chat(event.tokens)["content"]
        for one in tally.read(event):
            yield from self._output.take(one, self._scored if isinstance(one, ContentDelta) else ())
            self._scored = []  # text may have been held back for some steps; what others say has none
        if event.finish_reason is not None:
            cut = event.finish_reason is FinishReason.LENGTH
            yield from self._output.close("incomplete" if cut else "completed")

    def _complete(self, tally: Tally, last: StepEvent) -> Json:
        cut = last.finish_reason is FinishReason.LENGTH
        response = self._response(tally, "incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.enable_response_messages:
            response["input_messages"] = [self._raw(tally.job.prompt)]
            response["output_messages"] = [self._raw(self._tokens)]
        self._finished(response)
        return response

    def _response(self, tally: Tally, status: str) -> Json:
        body = self._body
        over = status != "in_progress"
        params = tally.job.params
        return {
            **self._head,
            "object": "response",
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": self._output.items if over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} if body.reasoning is None else body.reasoning.model_dump(),
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": _text_json(body),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage(tally) if over else None,
            "user": body.user,
        }

    def _raw(self, tokens: Sequence[int]) -> Json:
        """Return tokens in vLLM's form, special ones too."""
        text = self._tokenizer.decode(tokens, skip_special=False)
        return {"type": "raw_message_tokens", "message": text, "tokens": list(tokens)}

    def _usage(self, tally: Tally) -> Json:
        num_prompt = len(tally.job.prompt)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": tally.num_cached},
            "output_tokens": tally.num_tokens,
            "output_tokens_details": {"reasoning_tokens": tally.num_reasoning},
            "total_tokens": num_prompt + tally.num_tokens,
        }


def _text_json(body: ResponsesRequest) -> Json:
    form = None if body.text is None else body.text.format
    return {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)}
