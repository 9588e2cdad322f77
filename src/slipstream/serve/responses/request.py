"""What clients send to OpenAI's `/v1/responses`, and the same as a chat."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.serve.body import checked
from slipstream.serve.errors import HttpError
from slipstream.serve.fields import OF_CHATS, Others
from slipstream.serve.protocol import MAX_MESSAGES, ChatRequest, Generation, Name, Text
from slipstream.serve.responses.items import messages_of
from slipstream.serve.responses.namespaces import chat_tools
from slipstream.serve.stream import Json
from slipstream.serve.structured import Part, Schema
from slipstream.speculation.sampling import MAX_TOP_LOGPROBS

OTHERS = OF_CHATS.and_also(
    refused={
        "background": (None, False),
        "conversation": (None,),
        "prompt": (None,),
        "context_management": (None, []),
        "truncation": (None, "disabled"),
        "max_tool_calls": (None,),
        "previous_input_messages": (None, []),
    },
    harmless={
        "access_programs": "the API owner's own; there are no such programs here",
        "image": "no image is made, and a tool that would make one is refused",
    },
)
_LOGPROBS = "message.output_text.logprobs"
# Neither changes an answer here: nothing is encrypted, and there are no tools of the server's.
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "web_search_call.results")
_REPEATED = ("input", "tools", "tool_choice", "text", "metadata")  # foreign JSON that a response shows again
THEIRS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat that have another name here, for messages."""


class Format(Part):
    """The form an answer must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(max_length=512)] | None = None
    description: Text | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    """How the text is written."""

    format: Format | None = None
    verbosity: Annotated[str, Field(max_length=64)] | None = None


class Reasoning(Part):
    """How much the model thinks."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Annotated[str, Field(max_length=64)] | None = None


class ResponsesRequest(Generation):
    """The body of /v1/responses; the sampling fields of chats work here, too."""

    others: ClassVar[Others] = OTHERS

    input: Text | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]  # foreign JSON
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None  # foreign JSON
    tool_choice: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None  # foreign JSON
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    previous_response_id: Name | None = None
    store: bool | None = True
    include: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # whatever the model's template knows
    enable_response_messages: bool = Field(default=False, description="Add prompt and answer as text and as tokens.")

    @model_validator(mode="before")
    @classmethod
    def can_be_repeated(cls, values: Any) -> Any:  # whatever JSON came
        """Refuse what could be read but not be written again; texts that stand alone are checked with their length."""
        for name in _REPEATED if isinstance(values, dict) else ():
            if not isinstance(value := values.get(name), dict | list):
                continue
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except UnicodeEncodeError:
                raise HttpError(
                    400, f"{name} holds half a surrogate pair, which is no character.", param=name
                ) from None
            except ValueError:
                raise HttpError(400, f"{name} holds a number that JSON has not: NaN or infinity.", param=name) from None
        return values

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to report beside each token; None for no log probabilities."""
        if _LOGPROBS in (self.include or ()) or self.top_logprobs:
            return self.top_logprobs or 0
        return None

    def chat(self, history: Sequence[Json]) -> ChatRequest:
        """Return the request as a chat that goes on from earlier messages; raises HttpError."""
        if (self.n or 1) != 1:
            raise HttpError(400, f"n is {self.n}; a response has one answer.", param="n")
        unknown = next((name for name in self.include or () if name not in _INCLUDABLE), None)
        if unknown is not None:
            raise HttpError(400, f"include has {unknown!r}, which this server does not know.", param="include")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise HttpError(
                400, "text.verbosity is not supported by this server; leave it out.", param="text.verbosity"
            )
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields: Json = {
            **{name: getattr(self, name) for name in Generation.model_fields if name in self.model_fields_set},
            "messages": [*system, *history, *messages_of(self.input)],
            "max_completion_tokens": self.max_output_tokens,
            "tools": chat_tools(self.tools) if self.tools else None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "logprobs": self.logprobs is not None,
            "top_logprobs": self.logprobs,
            **_form(self.text),
        }
        return checked({name: value for name, value in fields.items() if value is not None}, ChatRequest)


def _choice(wanted: str | Json | None) -> str | Json | None:
    """Return a choice as chats have it, where allowed tools stand in a field of their own."""
    if isinstance(wanted, dict) and wanted.get("type") == "allowed_tools":
        return {"allowed_tools": wanted, **wanted}
    return wanted


def _form(text: TextOptions | None) -> Json:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if wanted.schema_ is None:
        raise HttpError(400, "text.format of type json_schema needs a schema.", param="text.format.schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}}
