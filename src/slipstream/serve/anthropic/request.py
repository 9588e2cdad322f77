"""What clients send to Anthropic's `/v1/messages`, and the same as a chat."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from slipstream.serve.body import checked
from slipstream.serve.errors import HttpError
from slipstream.serve.fields import OF_CHATS, Others
from slipstream.serve.protocol import MAX_MESSAGES, MAX_STOPS, ChatRequest, Count, Generation, Name, Request, Stop, Text
from slipstream.serve.stream import Json
from slipstream.serve.structured import Part, Schema

_MAX_TOOLS = 1024
OTHERS = OF_CHATS.and_also(
    refused={
        "container": (None,),
        "mcp_servers": (None, []),
        "context_management": (None, {}),
        "diagnostics": (None, {}),
    },
    harmless={
        "betas": "features of Anthropic's own; what a request needs of them is a field of its own",
        "cache_control": "prompts are cached without it; cache_salt keeps them apart",
        "inference_geo": "there is one place",
        "speed": "there is one speed",
        "user_profile_id": "names a user to the API's owner",
        "workspace_id": "names an account to the API's owner",
    },
)
THEIRS = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""Fields of a chat that have another name here, for messages."""


class Block(Part):
    """A part of a message: text, thinking, a call of a tool, or a tool's result. Which fields it has says its type."""

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None
    thinking: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None  # foreign JSON
    tool_use_id: Name | None = None
    content: Any = None  # of a tool's result: text, or blocks again
    source: dict[str, Any] | None = None  # foreign JSON


Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class Turn(Part):
    """One turn of a chat."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class Tool(Part):
    """A tool of the client's own; Anthropic's server tools have other types."""

    type: Annotated[str, Field(max_length=64)] | None = "custom"
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class ToolChoice(Part):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(Part):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class Format(Part):
    """The form an answer must have."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Part):
    """Form and effort of an answer."""

    format: Format | None = None
    effort: Annotated[str, Field(max_length=64)] | None = None


class Prompt(Request):
    """What tokens can be counted of: the body of /v1/messages/count_tokens."""

    others: ClassVar[Others] = OTHERS

    model: Name | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Blocks | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=_MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # whatever the model's template knows


class MessagesRequest(Prompt, Generation):
    """The body of /v1/messages; the sampling fields of chats work here, too."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    output_format: Format | None = Field(default=None, description="The older place of `output_config.format`.")


def chat_of(body: Prompt) -> ChatRequest:
    """Return the request as a chat; raises HttpError."""
    fields: Json = {"messages": list(_messages(body)), **_of_tools(body), **_of_effort(body)}
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    # The answer goes on where the last turn ends, if that is the assistant's.
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        if (body.n or 1) != 1:
            raise HttpError(400, f"n is {body.n}; a message has one answer.", param="n")
        fields |= {name: getattr(body, name) for name in Generation.model_fields if name in body.model_fields_set}
        fields["stop"] = body.stop_sequences or body.stop
        form = body.output_format or (body.output_config and body.output_config.format)
        if form:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    else:
        fields["model"] = body.model
    return checked({name: value for name, value in fields.items() if value is not None}, ChatRequest)


def _messages(body: Prompt) -> Iterator[Json]:
    if body.system:
        yield {"role": "system", "content": _text(body.system, "system")}
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}].content"
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "assistant":
            yield _assistant(turn.content, where)
        else:
            yield from _asked(turn.role, turn.content, where)


def _asked(role: str, blocks: Sequence[Block], where: str) -> Iterator[Json]:
    """Yield a user's turn: tools' results are messages of their own, with the text between them."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        here = f"{where}[{index}]"
        if block.type != "tool_result":
            texts.append(_block_text(block, here))
            continue
        if block.tool_use_id is None:
            raise HttpError(400, f"{here}.tool_use_id is missing.", param=f"{here}.tool_use_id")
        if texts:
            yield {"role": role, "content": "".join(texts)}
            texts = []
        content = block.content if block.content is not None else ""
        if not isinstance(content, str):
            content = _text(checked({"blocks": content}, _Result).blocks, f"{here}.content")
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if texts:
        yield {"role": role, "content": "".join(texts)}


class _Result(Part):
    blocks: Blocks


def _assistant(blocks: Sequence[Block], where: str) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        here = f"{where}[{index}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.id is None or block.name is None:
                raise HttpError(400, f"{here} needs an id and a name.", param=here)
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            texts.append(_block_text(block, here))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block_text(block: Block, where: str) -> str:
    if block.type == "text" and block.text is not None:
        return block.text
    source = block.source or {}
    if block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    raise HttpError(400, f"{where} is of type {block.type!r}; this model reads text only.", param=where)


def _of_tools(body: Prompt) -> Json:
    fields: Json = {}
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise HttpError(
                400,
                f"tools[{index}].type is {tool.type!r}; this server has no tools of its own, only the client's.",
                param=f"tools[{index}].type",
            )
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema or {"type": "object", "properties": {}},
                    **({} if tool.strict is None else {"strict": tool.strict}),
                },
            }
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        if choice.type == "tool" and choice.name is None:
            raise HttpError(400, "tool_choice of type tool needs a name.", param="tool_choice.name")
        named = {"type": "function", "function": {"name": choice.name}}
        modes = {"auto": "auto", "any": "required", "none": "none"}
        fields["tool_choice"] = named if choice.type == "tool" else modes[choice.type]
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _of_effort(body: Prompt) -> Json:
    fields: Json = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        fields["thinking"] = body.thinking.model_dump()
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    return fields
