"""The items of a response's input and output, and the messages of a chat they stand for."""

from collections.abc import Sequence
from typing import Any

from slipstream.serve.errors import HttpError
from slipstream.serve.responses.namespaces import flat_name
from slipstream.serve.stream import Json

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(items: str | Sequence[Json], field: str = "input") -> list[Json]:
    """Return the messages of a chat; raises HttpError.

    Reasoning, text and calls of one turn are items of their own here; templates want them in one message.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Json] = []
    for at, item in enumerate(items):
        where = f"{field}[{at}]"
        kind = item.get("type") or "message"
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "function_call":
            name = flat_name(item.get("namespace"), _needed(item, "name", where))
            function = {"name": name, "arguments": _needed(item, "arguments", where)}
            call = {"id": _needed(item, "call_id", where), "type": "function", "function": function}
            _open_turn(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _needed(item, "call_id", where), "content": output})
        elif kind == "reasoning":
            thought = _text(item.get("content") or item.get("summary") or "", f"{where}.content")
            turn = _open_turn(messages, new=True)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        else:
            raise HttpError(400, f"{where}.type is {str(kind)[:64]!r}, which this server does not read.", param=where)
    return messages


def _add_message(messages: list[Json], item: Json, where: str) -> None:
    role = _needed(item, "role", where)
    content = _text(item.get("content"), f"{where}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and "content" not in last:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _open_turn(messages: list[Json], new: bool = False) -> Json:
    """Return the assistant's turn that calls or thoughts belong to; thoughts begin a new one after text or calls."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (new and ("content" in last or "tool_calls" in last)):
        messages.append({"role": "assistant"})
    return messages[-1]


def _needed(item: Json, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise HttpError(400, f"{where}.{name} must be a text.", param=f"{where}.{name}")
    return value


def _text(content: Any, where: str) -> str:  # foreign JSON
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise HttpError(400, f"{where} must be a text or a list of parts.", param=where)
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if (kind not in _TEXT_PARTS and kind != "refusal") or not isinstance(text, str):
            raise HttpError(
                400, f"{where}[{at}] is of type {str(kind)[:64]!r}; this model reads text only.", param=f"{where}[{at}]"
            )
        texts.append(text)
    return "".join(texts)
