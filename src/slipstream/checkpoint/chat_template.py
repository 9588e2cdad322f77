"""A checkpoint's chat template: its syntax is checked here, and it is rendered in a child process with limits."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError, meta

from slipstream.checkpoint.confined import Confined, LimitError, Limits
from slipstream.checkpoint.template_program import template_environment
from slipstream.errors import CheckpointError, RequestError

TemplateValue = str | int | float | bool | None | Sequence[Any] | Mapping[str, Any]  # JSON, hence Any
LONGEST_TEMPLATE = 1 << 17
"""Characters; the longest published ones have thirty thousand."""
LIMITS = Limits(cpu_s=1.0, memory_bytes=1 << 30, answer_bytes=64 << 20)


class ChatTemplate:
    """A chat template; `origin` names the file it came from, for messages, and `variables` are those it reads."""

    def __init__(self, source: str, origin: str) -> None:
        self._origin = origin
        self._source = source
        self._child = Confined("slipstream.checkpoint.template_program", LIMITS)
        if len(source) > LONGEST_TEMPLATE:
            raise CheckpointError(
                f"{origin}: the chat template has {len(source)} characters; at most {LONGEST_TEMPLATE} are read."
            )
        try:
            parsed = template_environment().parse(source)  # not compiled: that would already compute constants
            self.variables = frozenset(meta.find_undeclared_variables(parsed))
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin}: the chat template is not valid Jinja (line {error.lineno}: {error.message})."
            ) from error
        except RecursionError as error:
            raise CheckpointError(f"{origin}: the chat template is nested too deep.") from error

    @property
    def source(self) -> str:
        """The template's text."""
        return self._source

    def render(self, variables: Mapping[str, TemplateValue]) -> str:
        """Return the text for the given variables; what the template refuses, or cannot do in time, is a RequestError.

        Rendering may take a second of processor time at the most.
        """
        try:
            answer = self._child.call({"source": self._source, "variables": dict(variables)})
        except LimitError as error:
            raise self._too_much(str(error)) from error
        if "refused" in answer:
            raise RequestError(f"The model's chat template refuses these messages: {answer['refused']}")
        if "exceeded" in answer:
            megabytes = LIMITS.memory_bytes >> 20
            depth = answer["exceeded"] == "depth"
            raise self._too_much("it calls itself too often" if depth else f"it takes more than {megabytes} MB")
        if "failed" in answer:
            raise RequestError(
                f"{self._origin}: the chat template fails on these messages "
                f"({answer['failed']}). Each message needs a 'role' and a 'content'."
            )
        return str(answer["text"])

    def _too_much(self, reason: str) -> RequestError:
        return RequestError(
            f"{self._origin}: the chat template cannot be rendered within its limits ({reason}). Send fewer or "
            f"shorter messages; if it is so with any, the template is broken or malicious."
        )
