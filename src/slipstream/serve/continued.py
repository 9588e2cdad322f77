"""Chats whose last message the model goes on with (`continue_final_message`): rendered, and cut where that ends."""

from collections.abc import Sequence

from slipstream.serve.errors import HttpError

_END = "\ufdd2"  # a noncharacter: Unicode keeps it out of texts
_FIELD = "continue_final_message"


def marked_end(turns: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return a chat whose last message ends with a mark; raises HttpError if that is no assistant's text."""
    last = turns[-1]
    if last["role"] != "assistant" or not last["content"] or "tool_calls" in last:
        raise HttpError(400, f"{_FIELD} needs a last message that is the assistant's and has text.", param=_FIELD)
    return [*turns[:-1], {**last, "content": f"{last['content']}{_END}"}]


def cut_at_end(text: str) -> str:
    """Return a rendered chat up to the mark; raises HttpError if the template did not write it."""
    before, mark, _ = text.rpartition(_END)
    if not mark:
        raise HttpError(400, f"{_FIELD}: the model's chat template does not show the last message.", param=_FIELD)
    return before
