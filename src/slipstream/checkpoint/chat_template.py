"""Render a checkpoint's chat template: Jinja in a sandbox, with the few functions that templates use."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import CheckpointError, RequestError

TemplateValue = str | int | float | bool | None | Sequence[Any] | Mapping[str, Any]  # JSON, hence Any


class ChatTemplate:
    """A compiled chat template; `origin` names the file it came from, for messages."""

    def __init__(self, source: str, origin: str) -> None:
        self._origin = origin
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin}: the chat template is not valid Jinja (line {error.lineno}: {error.message})."
            ) from error

    def render(self, variables: Mapping[str, TemplateValue]) -> str:
        """Return the text for the given variables; what the template refuses is a RequestError."""
        try:
            return self._template.render(**variables)
        except _RefusedError as error:
            raise RequestError(f"The model's chat template refuses these messages: {error}") from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"{self._origin}: the chat template fails on these messages "
                f"({type(error).__name__}: {error}). Each message needs a 'role' and a 'content'."
            ) from error


class _RefusedError(Exception):
    """What a template raises through raise_exception, apart from Jinja's own errors."""


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the answer for training masks; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Read up to `endgeneration`, and return the body itself."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(value: Any, indent: int | None = None) -> str:  # any JSON value
    # Jinja's own tojson escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=False, indent=indent)
