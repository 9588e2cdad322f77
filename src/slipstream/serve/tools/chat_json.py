"""An answer's events as the JSON of chat completions: messages, and the deltas of a stream."""

from collections.abc import Iterable
from typing import Any

from slipstream.serve.tools.events import (
    AnswerEvent,
    ArgumentsDelta,
    Call,
    CallBegin,
    ContentDelta,
    Message,
    ReasoningDelta,
)

Json = dict[str, Any]


def message_json(message: Message, with_reasoning: bool = True) -> Json:
    """Return a whole answer; beside calls, no text is null, and no reasoning always is: SGLang's clients read both."""
    body: Json = {
        "role": "assistant",
        "content": message.content or (None if message.calls else ""),
        "refusal": None,
        "reasoning_content": (message.reasoning or None) if with_reasoning else None,
    }
    if message.calls:
        body["tool_calls"] = [_call(call) for call in message.calls]
    return body


def delta_json(events: Iterable[AnswerEvent], with_reasoning: bool = True) -> Json:
    """Return one delta for the events of a step; empty if they say nothing."""
    content = reasoning = ""
    calls: dict[int, Json] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, CallBegin):
            call = Call(event.call_id, event.name, "")
            calls[event.index] = {"index": event.index, **_call(call)}
        elif isinstance(event, ArgumentsDelta):
            call_json = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call_json["function"]["arguments"] += event.text
    delta: Json = {}
    if reasoning and with_reasoning:
        delta["reasoning_content"] = reasoning
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _call(call: Call) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
