"""The child process that renders chat templates: Jinja in a sandbox, with the few functions that templates use."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_compiled: dict[str, Template] = {}  # the one template of this process, by its source


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for, as transformers has it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def handle(request: Mapping[str, Any]) -> dict[str, str]:
    """Render a template (`source`) with variables: `text`, or what it was `refused` or `failed` for."""
    source = request["source"]
    try:
        if source not in _compiled:
            _compiled.clear()
            _compiled[source] = template_environment().from_string(source)
        return {"text": _compiled[source].render(**request["variables"])}
    except _RefusedError as error:
        return {"refused": str(error)[:1000]}
    except (MemoryError, RecursionError) as error:
        return {"exceeded": "memory" if isinstance(error, MemoryError) else "depth"}
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:1000]}"}


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


def _to_json(
    value: Any,  # any JSON value
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes <, > and & for HTML, which would change what the model reads. The arguments are those
    # that transformers' has, in its order.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
