"""Writes docs/request-fields.md from the server's own tables: what becomes of every field a request may have."""

from collections.abc import Collection
from pathlib import Path

from slipstream.serve.fields import HARMLESS, REFUSED
from slipstream.serve.protocol import ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[1] / "docs" / "request-fields.md"
_HEAD = """# Request fields

<!-- Written by scripts/request_fields.py; change src/slipstream/serve/fields.py or protocol.py, then run it again. -->

What becomes of every field of OpenAI's, vLLM's and SGLang's chat and completion requests here. A null is an absence.
A field on none of these lists is unknown to all of them: it is ignored, and the log names it once. An interop test
(`pytest -m interop tests/peers`) compares the lists with the packages `openai`, `vllm` and `sglang`.
"""


def page() -> str:
    """Return the page."""
    chat, completion = ChatRequest.model_fields.keys(), CompletionRequest.model_fields.keys()
    refused = sorted(REFUSED)
    return "\n".join(
        [
            _HEAD,
            "## Works\n",
            f"In chats and completions: {_names(chat & completion)}.\n",
            f"In chats: {_names(chat - completion)}.\n",
            f"In completions: {_names(completion - chat)}.\n",
            "## Refused by name\n",
            "A 400 whose `error.param` is the field, unless its value asks for nothing.\n",
            "| Field | Values that ask for nothing | Where |",
            "|---|---|---|",
            *(f"| `{name}` | {_values(REFUSED[name])} | {_where(name, chat, completion)} |" for name in refused),
            "\n## Harmless to leave aside\n",
            "| Field | Why no answer changes |",
            "|---|---|",
            *(f"| `{name}` | {HARMLESS[name]} |" for name in sorted(HARMLESS)),
            "",
        ]
    )


def _names(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _values(values: tuple[object, ...]) -> str:
    shown = [str(value).lower() if isinstance(value, bool) else repr(value) for value in values if value is not None]
    return ", ".join(f"`{value}`" for value in shown) or "null"


def _where(name: str, chat: Collection[str], completion: Collection[str]) -> str:
    if name in chat:
        return "completions; it works in chats"
    return "chats; it works in completions" if name in completion else "both"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
