"""An answer as a response's output items, and the events that a stream tells them by."""

import secrets
from collections.abc import Iterator, Mapping, Sequence

from slipstream.serve.stream import Json
from slipstream.serve.tools.events import AnswerEvent, ArgumentsDelta, CallBegin, CallEnd, ContentDelta, ReasoningDelta

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Output:
    """The items of one answer, as far as it goes; each step's events are told once."""

    def __init__(self, grouped: Mapping[str, tuple[str, str]]) -> None:
        """Begin with no items.

        Args:
            grouped: namespace and name of the functions that have one, by what a chat calls them.
        """
        self.items: list[Json] = []
        self._grouped = grouped
        self._open: Json | None = None

    def take(self, event: AnswerEvent, logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """Take in an event of the answer, and yield what a stream says of it."""
        if isinstance(event, ContentDelta):
            yield from self._in("message", role="assistant")
            yield self._text(event.text, "output_text", logprobs)
        elif isinstance(event, ReasoningDelta):
            yield from self._in("reasoning", summary=[])
            yield self._text(event.text, "reasoning_text")
        elif isinstance(event, CallBegin):
            yield from self.close()
            namespace, name = self._grouped.get(event.name, (None, event.name))
            named = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
            yield from self._in("function_call", call_id=event.call_id, **named, arguments="")
        elif isinstance(event, ArgumentsDelta):
            assert self._open is not None, "a call has begun"
            self._open["arguments"] += event.text
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": event.text}
        elif isinstance(event, CallEnd):
            yield from self.close()

    def close(self, status: str = "completed") -> Iterator[Json]:
        """End the open item."""
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **said}
        else:
            part = item["content"][0]
            here = {**self._place(), "content_index": 0}
            scored = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield {"type": f"response.{part['type']}.done", **here, "text": part["text"], **scored}
            yield {"type": "response.content_part.done", **here, "part": {**part}}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copied(item)}
        self._open = None

    def _in(self, kind: str, **fields: object) -> Iterator[Json]:
        """Open an item of that kind unless one is open already."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self.close()
        item: Json = {"type": kind, "id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "status": "in_progress"}
        item |= fields
        self.items.append(item)
        self._open = item
        if kind == "function_call":
            yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copied(item)}
            return
        item["content"] = []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copied(item)}
        part: Json = {"type": _PARTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": {**part}}

    def _text(self, text: str, kind: str, logprobs: Sequence[Json] = ()) -> Json:
        assert self._open is not None, "an item is open"
        part = self._open["content"][0]
        part["text"] += text
        event: Json = {"type": f"response.{kind}.delta", **self._place(), "content_index": 0, "delta": text}
        if kind == "output_text":
            part["logprobs"] = [*part["logprobs"], *logprobs]
            event["logprobs"] = list(logprobs)
        return event

    def _place(self) -> Json:
        assert self._open is not None, "an item is open"
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}


def _copied(item: Json) -> Json:
    """Return an item as it is now: events may be written after it has grown."""
    return {**item, **({"content": [{**part} for part in item["content"]]} if "content" in item else {})}
