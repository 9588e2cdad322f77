"""What clients send about tools and reasoning: OpenAI's fields, checked, and kept as they came for the template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from slipstream.serve.errors import HttpError
from slipstream.serve.structured import Part
from slipstream.serve.tools.parser import Tool

MAX_TOOLS = 1024
MAX_CALLS = 1024  # of one message of the history
_NAME = re.compile(r'[^\s"<>|\x00-\x1f]{1,256}')

Json = dict[str, Any]  # foreign JSON


def _checked_tool(raw: Json) -> Json:
    """Return a tool as it came; ValueError says what is wrong with it."""
    function = raw.get("function")
    if raw.get("type") != "function" or not isinstance(function, Mapping):
        raise ValueError('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("function.name must be 1 to 256 characters without white space, quotes, <, > and |")
    if not isinstance(function.get("description"), str | None):
        raise ValueError("function.description must be a text")
    if not isinstance(function.get("parameters"), Mapping | bool | None):
        raise ValueError("function.parameters must be a JSON schema")
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError("function.strict must be true or false")
    return raw


RawTool = Annotated[Json, AfterValidator(_checked_tool)]
RawTools = Annotated[list[RawTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class CalledFunction(Part):
    """The function of a call in the history; arguments are JSON text, or (leniently) JSON."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, Field(max_length=1 << 24)] | Json | None = None


class HistoryCall(Part):
    """A call that an assistant's message of the history made."""

    id: Annotated[str, Field(max_length=512)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


HistoryCalls = Annotated[list[HistoryCall], Field(fail_fast=True, max_length=MAX_CALLS)]


class Thinking(Part):
    """Kimi's and DeepSeek's switch; Anthropic's has a budget, for templates that know one."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None


@dataclass(frozen=True)
class Choice:
    """Which tools an answer may or must call.

    Args:
        mode: `required` demands a call, `none` forbids any.
        tools: those that may be called.
        max_calls: None for any number.
        named: the request itself named the one tool that is to be called.
    """

    mode: Literal["none", "auto", "required"] = "none"
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None
    named: bool = False


def choice_of(raw_tools: Sequence[Json] | None, wanted: str | Json | None, parallel: bool | None) -> Choice:
    """Return what `tools`, `tool_choice` and `parallel_tool_calls` come to; raises HttpError that names the field."""
    if raw_tools is not None and not raw_tools:
        raise HttpError(400, "tools is an empty list; name at least one tool, or leave it out.", param="tools")
    tools = tuple(tool_of(raw, place) for place, raw in enumerate(raw_tools or ()))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise HttpError(400, f"tools names {twice!r} twice; a call could not tell them apart.", param="tools")
    if wanted is None:
        wanted = "auto" if tools else "none"
    max_calls = None if parallel is None or parallel else 1
    if isinstance(wanted, str):
        return _by_mode(wanted, tools, max_calls)
    if wanted.get("type") == "allowed_tools":
        return _allowed(wanted.get("allowed_tools"), tools, max_calls)
    return Choice("required", (_named(wanted, tools),), 1, named=True)


def tool_of(raw: Json, place: int) -> Tool:
    """Return a checked tool, which has a place among others."""
    function = raw["function"]
    parameters = function.get("parameters")
    schema = dict(parameters) if isinstance(parameters, Mapping) else None
    field = f"tools[{place}].function.parameters"
    return Tool(function["name"], function.get("description"), schema, bool(function.get("strict")), field)


def arguments_json(arguments: str | Json | None) -> Json | str:
    """Return a call's arguments as JSON; text that is no JSON object (a model wrote it) stays text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _by_mode(wanted: str, tools: tuple[Tool, ...], max_calls: int | None) -> Choice:
    if wanted == "none" or (wanted == "auto" and not tools):
        return Choice()
    if wanted == "auto":
        return Choice("auto", tools, max_calls)
    if wanted != "required":
        raise HttpError(
            400, f"tool_choice is {wanted!r}; it is none, auto, required, or names a function.", param="tool_choice"
        )
    if not tools:
        raise HttpError(400, "tool_choice is required, but there are no tools to call.", param="tool_choice")
    return Choice("required", tools, max_calls)


def _allowed(wanted: Any, tools: tuple[Tool, ...], max_calls: int | None) -> Choice:  # foreign JSON
    listed = wanted.get("tools") if isinstance(wanted, Mapping) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(one, Mapping) for one in listed):
        raise HttpError(400, "tool_choice.allowed_tools needs a mode and tools.", param="tool_choice")
    some = tuple(_named(one, tools) for one in listed)
    return _by_mode(str(wanted.get("mode", "auto")), some, max_calls)


def _named(wanted: Mapping[str, Any], tools: tuple[Tool, ...]) -> Tool:
    function = wanted.get("function")
    name = function.get("name") if isinstance(function, Mapping) else wanted.get("name")
    if not isinstance(name, str):
        raise HttpError(
            400, 'tool_choice must be {"type": "function", "function": {"name": ...}}.', param="tool_choice"
        )
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        raise HttpError(400, f"Tool {name!r} not found in tools list; tool_choice names it.", param="tool_choice")
    return found
