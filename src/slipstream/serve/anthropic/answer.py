"""Answers in the form of Anthropic's Messages: blocks of text, thinking and tool calls, whole or as a stream."""

import json
from collections.abc import Iterator, Sequence

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.request import FinishReason
from slipstream.serve.answers import Tally, stopped_by
from slipstream.serve.errors import HttpError
from slipstream.serve.stream import Json, server_sent_event
from slipstream.serve.ticket import StepEvent
from slipstream.serve.tools.events import AnswerEvent, ArgumentsDelta, CallBegin, CallEnd, ContentDelta, ReasoningDelta


class MessageWriter:
    """Writes one message. A whole one is the stream's events, joined."""

    def __init__(self, tokenizer: Tokenizer, head: Json, request_id: str, streams: bool) -> None:
        """Keep what the answer begins with.

        Args:
            head: id and model, and what else is said of every answer.
        """
        self._tokenizer = tokenizer
        self._head = head
        self._request_id = request_id
        self._streams = streams
        self._open: str | None = None
        self._num_blocks = 0

    @property
    def tells_of_aborts(self) -> bool:
        """Whether an answer that was called off has a form of its own; it ends with an error here."""
        return False

    @property
    def streams(self) -> bool:
        """Whether the answer goes out in parts."""
        return self._streams

    def whole(self, tallies: Sequence[Tally], events: Sequence[Sequence[StepEvent]]) -> Json:
        """Return a message that is not streamed."""
        message: Json = {}
        for event in events[0]:
            for one in self._events(tallies[0], event):
                _join(message, one)
        return message

    def part(self, index: int, tallies: Sequence[Tally], event: StepEvent) -> bytes:
        """Return what a stream says of a step."""
        return b"".join(server_sent_event(one, one["type"]) for one in self._events(tallies[index], event))

    def end(self, tallies: Sequence[Tally]) -> bytes:
        """Return a stream's last event."""
        return server_sent_event({"type": "message_stop"}, "message_stop")

    def failure(self, error: HttpError) -> bytes:
        """Return how a stream that has begun ends with an error."""
        return server_sent_event(error.anthropic(self._request_id), "error")

    def _events(self, tally: Tally, event: StepEvent) -> Iterator[Json]:
        if not tally.started:
            tally.started = True
            yield {"type": "message_start", "message": self._beginning(tally)}
        for one in tally.read(event):
            yield from self._of(one)
        if event.finish_reason is not None:
            yield from self._closed()
            yield {
                "type": "message_delta",
                "delta": self._reason(tally, event),
                "usage": _usage(tally, tally.num_tokens),
            }

    def _beginning(self, tally: Tally) -> Json:
        return {
            **self._head,
            "type": "message",
            "role": "assistant",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(tally, 0),
        }

    def _of(self, event: AnswerEvent) -> Iterator[Json]:
        if isinstance(event, ContentDelta):
            yield from self._opened({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, ReasoningDelta):
            yield from self._opened({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, CallBegin):
            yield from self._closed()
            yield from self._opened({"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}})
        elif isinstance(event, ArgumentsDelta):
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        elif isinstance(event, CallEnd):
            yield from self._closed()

    def _opened(self, block: Json) -> Iterator[Json]:
        """Open a block, and close one of another kind first."""
        if self._open != block["type"]:
            yield from self._closed()
            self._open = block["type"]
            yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _closed(self) -> Iterator[Json]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._open = None
            self._num_blocks += 1

    def _reason(self, tally: Tally, last: StepEvent) -> Json:
        found = stopped_by(tally.job, last, self._tokenizer.eos_token_ids)
        if last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif isinstance(found, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        else:
            reason = "tool_use" if tally.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(tally: Tally, num_output: int) -> Json:
    """Return the usage; tokens found in the cache are counted apart, as Anthropic does."""
    return {
        "input_tokens": len(tally.job.prompt) - tally.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tally.num_cached,
        "output_tokens": num_output,
    }


def _join(message: Json, event: Json) -> None:
    """Add an event of a stream to the message it is part of."""
    kind = event["type"]
    if kind == "message_start":
        message.update(event["message"])
    elif kind == "message_delta":
        message.update(event["delta"], usage=event["usage"])
    elif kind == "content_block_start":
        message["content"].append({**event["content_block"]})
    elif kind == "content_block_delta":
        block, delta = message["content"][-1], event["delta"]
        if delta["type"] == "input_json_delta":
            block["input"] = (block["input"] or "") + delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]
    elif message["content"][-1]["type"] == "tool_use":
        message["content"][-1]["input"] = _object(message["content"][-1]["input"])


def _object(text: str | Json) -> Json:
    """Return a call's arguments; an answer that was cut off may hold half of them, and then has none."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
