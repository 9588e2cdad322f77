"""Texts as llguidance's dialect of Lark has them: literals, regular expressions, markers that are tokens."""

import json
import re
from collections.abc import Mapping
from typing import Any

ANY_TEXT = "/(.|\\n)*/"


def literal(text: str) -> str:
    """Return a text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def spelled(text: str, tokens: Mapping[str, int]) -> str:
    """Return a text with its markers by their ids, where they have some, and numbers where it says `{count}`."""
    parts = re.split(f"({'|'.join(map(re.escape, [*tokens, '{count}']))})", text)
    written = {"": "", "{count}": "/[0-9]{1,4}/", **{marker: f"<[{token_id}]>" for marker, token_id in tokens.items()}}
    return " ".join(filter(None, (written.get(part, literal(part)) for part in parts)))


def text_up_to(rule: str, end: str, tokens: Mapping[str, int]) -> tuple[str, str]:
    """Return an expression for any text with its end marker, and the rules that it needs."""
    if end in tokens:
        return f"{ANY_TEXT} <[{tokens[end]}]>", ""
    # One lexeme up to the end marker, so that it ends at the first.
    return f"{rule}_text", f"{rule}_text[lazy]: /(.|\\n)*{escaped(end)}/\n"


def string_up_to(rule: str, schema: dict[str, Any], end: str, tokens: Mapping[str, int]) -> tuple[str, str]:
    """Return an expression for a text that follows a schema and its end, and the rules that it needs."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    closing = spelled(end, tokens)
    if isinstance(listed, list) and listed:
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in listed]
        return f"({' | '.join(map(literal, texts))}) {closing}", ""
    if isinstance(pattern := schema.get("pattern"), str):
        return f"/{_searched(pattern)}/ {closing}", ""
    if "minLength" in schema or "maxLength" in schema:
        return f"/[^<]{{{int(schema.get('minLength', 0))},{schema.get('maxLength', '')}}}/ {closing}", ""
    return text_up_to(rule, end.lstrip("\n"), tokens)


def _searched(pattern: str) -> str:
    """Return a regular expression for a whole text in which a schema's pattern is found."""
    before = "" if pattern.startswith("^") else "[^<]*"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "[^<]*"
    inner = pattern.removeprefix("^")
    inner = inner if after else inner.removesuffix("$")
    return re.sub(r"(?<!\\)/", r"\\/", f"{before}({inner}){after}")
