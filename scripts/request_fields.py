"""Writes docs/request-fields.md from the server's own tables: what becomes of every field a request may have."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from slipstream.serve.anthropic.request import MessagesRequest, Prompt
from slipstream.serve.fields import HARMLESS, OF_CHATS, REFUSED, Others
from slipstream.serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from slipstream.serve.responses.request import ResponsesRequest
from slipstream.serve.sglang.fields import OF_SAMPLING
from slipstream.serve.sglang.request import GenerateRequest, Sampling

PAGE = Path(__file__).parents[1] / "docs" / "request-fields.md"
_HEAD = """# Request fields

<!-- Written by scripts/request_fields.py; change the tables in src/slipstream/serve, then run it again. -->

What becomes of every field of OpenAI's, Anthropic's, vLLM's and SGLang's requests here. A null is an absence.
A field on none of these lists is unknown to all of them: it is ignored, and the log names it once. An interop test
(`pytest -m interop tests/peers`) compares the lists with the packages `openai`, `anthropic`, `vllm` and `sglang`.
"""
_HINTS = """
`reasoning_effort`, Responses' `reasoning.effort` and the budget of `thinking` (`budget_tokens`) set the template's
switches; where a template has none they are hints that are left aside. Not to think at all (`none`, `disabled`) is a
400 where the template opens the reasoning nevertheless."""


def page() -> str:
    """Return the page."""
    chat, completion = ChatRequest.model_fields.keys(), CompletionRequest.model_fields.keys()
    shared = chat & completion
    refused = sorted(REFUSED)
    messages = MessagesRequest.model_fields.keys() | Prompt.model_fields.keys()
    return "\n".join(
        [
            _HEAD,
            "## Works\n",
            f"In chats and completions: {_names(shared)}.\n",
            f"In chats: {_names(chat - completion)}.\n",
            f"In completions: {_names(completion - chat)}.",
            _HINTS,
            "\n## Refused by name\n",
            "A 400 whose `error.param` is the field, unless its value asks for nothing.\n",
            "| Field | Values that ask for nothing | Where |",
            "|---|---|---|",
            *(f"| `{name}` | {_values(REFUSED[name])} | {_where(name, chat, completion)} |" for name in refused),
            "\n## Harmless to leave aside\n",
            *_harmless(HARMLESS),
            *_section(
                "Responses", "`/v1/responses`", ResponsesRequest.model_fields.keys() - shared, ResponsesRequest.others
            ),
            *_section("Messages", "`/v1/messages` and `/v1/messages/count_tokens`", messages - shared, Prompt.others),
            *_section("Generate", "SGLang's `/generate`", GenerateRequest.model_fields.keys(), GenerateRequest.others),
            *_section("Generate's sampling_params", "`sampling_params`", Sampling.model_fields.keys(), OF_SAMPLING),
            "\n## Tokens\n",
            f"`/tokenize` has {_names(TokenizeRequest.model_fields)}.",
            "",
        ]
    )


def _section(title: str, place: str, works: Collection[str], others: Others) -> Iterator[str]:
    """Yield what one of the other APIs has of its own."""
    beside = others.refused.keys() >= OF_CHATS.refused.keys()
    refused = others.refused.keys() - (REFUSED if beside else ())
    harmless = {name: why for name, why in others.harmless.items() if not beside or name not in HARMLESS}
    yield f"\n## {title}\n"
    shared = ", beside those that chats and completions share," if beside else ""
    yield f"In {place} work{shared} {_names(works)}.\n"
    yield f"{'Also r' if beside else 'R'}efused by name: {_names(refused)}.\n"
    yield from _harmless(harmless)


def _harmless(table: Mapping[str, str]) -> Iterator[str]:
    yield "| Field | Why no answer changes |"
    yield "|---|---|"
    yield from (f"| `{name}` | {table[name]} |" for name in sorted(table))


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
