"""The fields by which clients say what form an answer must have, in OpenAI's, vLLM's and SGLang's spellings."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slipstream.serve.closed_schemas import closed
from slipstream.serve.errors import HttpError
from slipstream.serve.grammar_trial import WHITE_SPACE, GrammarSource

_MAX_CHOICES = 1 << 14
_PATTERN_LENGTH = 256

Source = Annotated[str, Field(max_length=1 << 24)]
Choices = Annotated[list[Source], Field(fail_fast=True, max_length=_MAX_CHOICES)]
Schema = dict[str, Any] | bool  # foreign JSON


@dataclass(frozen=True)
class Constraint:
    """What an answer must follow, and the request's field that says so."""

    source: GrammarSource
    field: str


class Part(BaseModel):
    """A part of a request: unknown fields are ignored, a null is an absence, and NaN is no number."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, values: Any) -> Any:  # whatever JSON came
        """Drop fields that are null, so that each has its default."""
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class JsonSchema(Part):
    """A named JSON schema the answer must follow."""

    name: str = "answer"
    schema_: Schema = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """The form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """vLLM's field; one of the first five."""

    json_: Schema | Source | None = Field(default=None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Any = None  # refused
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Annotated[str, Field(max_length=_PATTERN_LENGTH)] | None = None


class Structured(Part):
    """The fields of a request that constrain its answer; one of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    guided_whitespace_pattern: Annotated[str, Field(max_length=_PATTERN_LENGTH)] | None = None
    json_schema: Schema | Source | None = None
    regex: Source | None = None
    ebnf: Source | None = None


def constraint_of(request: Structured) -> Constraint | None:
    """Return what a request wants its answer to follow; None if any text will do. Raises HttpError."""
    found = [
        *_of_response_format(request.response_format),
        *_of_structured_outputs(request.structured_outputs),
        *_of_guided(request),
        *_of_schema(request.json_schema, "json_schema"),
        *_of_text("regex", request.regex, "regex"),
        *_of_grammar(request.ebnf, "ebnf"),
    ]
    if len(found) > 1:
        fields = " and ".join(dict.fromkeys(one.field for one in found))
        raise HttpError(400, f"{fields} both constrain the answer; give one of them.", param=found[1].field)
    return found[0] if found else None


def _of_response_format(wanted: ResponseFormat | None) -> Iterator[Constraint]:
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_object":
        yield Constraint(_ANY_OBJECT, "response_format")
    elif wanted.json_schema is None:
        raise HttpError(
            400, "response_format of type json_schema needs a json_schema.", param="response_format.json_schema"
        )
    else:
        yield from _of_schema(wanted.json_schema.schema_, "response_format.json_schema.schema")


def _of_structured_outputs(wanted: StructuredOutputs | None) -> Iterator[Constraint]:
    if wanted is None:
        return
    here = "structured_outputs"
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(wanted, name):
            raise HttpError(
                400, f"{here}.{name} is not supported by this server; leave it out.", param=f"{here}.{name}"
            )
    space = wanted.whitespace_pattern or WHITE_SPACE
    found = [
        *_of_schema(wanted.json_, f"{here}.json", None if wanted.disable_any_whitespace else space),
        *_of_text("regex", wanted.regex, f"{here}.regex"),
        *_of_choice(wanted.choice, f"{here}.choice"),
        *_of_grammar(wanted.grammar, f"{here}.grammar"),
        *([Constraint(_ANY_OBJECT, f"{here}.json_object")] if wanted.json_object else []),
    ]
    if not found:
        raise HttpError(400, f"{here} needs one of json, regex, choice, grammar and json_object.", param=here)
    yield from found


def _of_guided(request: Structured) -> Iterator[Constraint]:
    yield from _of_schema(request.guided_json, "guided_json", request.guided_whitespace_pattern or WHITE_SPACE)
    yield from _of_text("regex", request.guided_regex, "guided_regex")
    yield from _of_choice(request.guided_choice, "guided_choice")
    yield from _of_grammar(request.guided_grammar, "guided_grammar")


def _of_schema(schema: Schema | str | None, field: str, white_space: str | None = WHITE_SPACE) -> Iterator[Constraint]:
    """Schemas come as JSON, or as texts that hold JSON; the trial finds those that do not."""
    if schema is None or schema == "":
        return
    text = _closed_text(schema) if isinstance(schema, str) else json.dumps(closed(schema))
    yield Constraint(GrammarSource("json_schema", text, white_space), field)


def _closed_text(text: str) -> str:
    try:
        return json.dumps(closed(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def _of_text(kind: Literal["regex", "lark", "gbnf"], text: str | None, field: str) -> Iterator[Constraint]:
    if text:  # SGLang's clients send an empty one for none
        yield Constraint(GrammarSource(kind, text), field)


def _of_grammar(text: str | None, field: str) -> Iterator[Constraint]:
    """Every rule of the one dialect has `::=`, none of the other."""
    yield from _of_text("gbnf" if text and "::=" in text else "lark", text, field)


def _of_choice(choices: list[str] | None, field: str) -> Iterator[Constraint]:
    if choices is None:
        return
    if not choices or not all(choices):
        raise HttpError(400, f"{field} must be a list of texts that are not empty.", param=field)
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    yield Constraint(GrammarSource("lark", f"start: {alternatives}"), field)


_ANY_OBJECT = GrammarSource("json_schema", '{"type": "object"}')
