"""Schemas that are expensive to compile, to follow, or both, and schemas nothing can follow."""

import asyncio
import json
from typing import Any

from tests.attack.kinds import CHAT, COMPLETIONS, Attack, post, require
from tests.attack.wire import Wire

Schema = dict[str, Any] | bool
_HONEST: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def asking(schema: Schema, **more: Any) -> dict[str, Any]:
    """Return a completion whose answer must follow a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"prompt": "JSON:", "max_tokens": 12, "temperature": 0, "response_format": form, **more}


def attacks() -> list[Attack]:
    """Return every attack through a schema."""
    bombs = [post(name, asking(schema), in_short=name in _IN_SHORT) for name, schema in _bombs().items()]
    return [*bombs, *_with_sampling(), *_raw_nesting(), _many_at_once(), _same_at_once(), _references_are_not_fetched()]


_IN_SHORT = {"3000 $defs, a chain of properties", "25 patterns at once", "500 optional properties"}


def _bombs() -> dict[str, Schema]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    links = {f"d{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)}
    end = {"d3000": {"type": "string"}}
    patterns = [{"pattern": f".*a.{{{5 + i % 3}}}b.*"} for i in range(25)]
    objects = [{"type": "object", "properties": {f"k{i}": {"type": "integer"}}} for i in range(300)]
    tree = {"type": "object", "properties": {name: {"$ref": "#"} for name in "abcdefgh"}}
    return {
        "3000 $defs, a chain of references": {"$defs": {**chain, **end}, "$ref": "#/$defs/d0"},
        "3000 $defs, a chain of properties": {"$defs": {**links, **end}, "$ref": "#/$defs/d0"},
        "1000 $defs in a ring": {"$defs": _ring(1000), "$ref": "#/$defs/d0"},
        "25 patterns at once": {"type": "string", "allOf": patterns},
        "allOf of 20 anyOf": {"allOf": [{"anyOf": objects[i : i + 8]} for i in range(20)]},
        "500 optional properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
        "5000 properties": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}},
        "anyOf of 300": {"anyOf": objects},
        "oneOf of 300": {"oneOf": objects},
        "enum of 100000": {"enum": [f"word {i}" for i in range(100_000)]},
        "enum of one megabyte": {"enum": ["x" * (1 << 20)]},
        "const, a deep value": {"const": json.loads("[" * 300 + "]" * 300)},
        "nested quantifiers": {"type": "string", "pattern": "^(a+)+$"},
        "ambiguous stars": {"type": "string", "pattern": "^(a|a|aa)*(a|aa)*(a|aa)*b$"},
        "counted counts": {"type": "string", "pattern": "^((a{0,1000}){0,1000}){0,1000}$"},
        "a long count": {"type": "string", "pattern": "^.{100000}$"},
        "many counts": {"type": "string", "pattern": "".join(f"[^{chr(97 + i)}]{{1,2000}}" for i in range(26))},
        "letters of any script": {"type": "string", "pattern": r"^(\p{L}\p{M}*){500}$"},
        "look-ahead": {"type": "string", "pattern": "^(?=.*a)(?=.*b).*$"},
        "back reference": {"type": "string", "pattern": r"^(a*)\1$"},
        "an open bracket": {"type": "string", "pattern": "["},
        "minLength 2^31": {"type": "string", "minLength": 1 << 31},
        "maxLength 10^9": {"type": "string", "maxLength": 10**9},
        "minItems 10^6": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        "maxItems 10^9": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
        "minProperties 10^6": {"type": "object", "minProperties": 10**6},
        "multipleOf 1e-300": {"type": "number", "multipleOf": 1e-300},
        "bounds of 300 digits": {"type": "integer", "minimum": 10**300, "maximum": 10**300 + 1},
        "bounds upside down": {"type": "integer", "minimum": 2, "maximum": 1},
        "a reference to itself": {"$ref": "#"},
        "a definition of itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "eight recursions": tree,
        "200 overlapping patterns of names": {
            "type": "object",
            "patternProperties": {f"^.*{i}.*$": {"type": "integer"} for i in range(200)},
        },
        "names by a pattern": {"type": "object", "propertyNames": {"pattern": "^(x+x+)+y$"}},
        "false": False,
        "not anything": {"not": {}},
        "a type nobody knows": {"type": "nothing"},
        "types that are no types": {"type": [1, None]},
        "properties that are none": {"type": "object", "properties": [1]},
        "an enum of nothing": {"enum": []},
        "options of the grammar library": {
            "type": "object",
            "x-guidance": {"whitespace_pattern": "(a+)+", "lenient": 1},
        },
    }


def _ring(size: int) -> dict[str, Schema]:
    return {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + step) % size}"} for step in (1, 7, 31)] + [{"const": i}]}
        for i in range(size)
    }


def _with_sampling() -> list[Attack]:
    """Return grammars that other fields of the same request contradict."""
    one_token = {"enum": [1]}
    return [
        post("one token, which min_tokens forbids", asking(one_token, min_tokens=8), in_short=True),
        post("the empty string and min_tokens", asking({"const": ""}, min_tokens=10)),
        post("a grammar and every token at -100", lambda wire: asking(_HONEST, logit_bias=_all(wire, -100))),
        post("a grammar and every token at +100", lambda wire: asking(_HONEST, logit_bias=_all(wire, 100))),
        post("a grammar at T = 100", asking(_HONEST, temperature=100, top_k=1, seed=1)),
        post("a grammar that a stop string cuts", asking(_HONEST, stop=["{", "}", '"'])),
        post("a grammar, one token long", asking(_HONEST, max_tokens=1, logprobs=20)),
        post("a grammar for 64 answers", asking(_HONEST, n=64, temperature=1, seed=3)),
        post("a grammar and stop_token_ids", lambda wire: asking(_HONEST, stop_token_ids=list(range(256)))),
        post("500 optional properties, 8 answers", asking(_bombs()["500 optional properties"], n=8, temperature=1)),
        post("json_object, penalised", {"prompt": "J", "max_tokens": 24, "response_format": {"type": "json_object"},
             "presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 10}),
        post("json_object in a chat", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8,
             "response_format": {"type": "json_object"}, "min_tokens": 8}, CHAT),
    ]  # fmt: skip


def _all(wire: Wire, bias: float) -> dict[str, float]:
    return {str(token): bias for token in range(wire.vocab_size)}


def _raw_nesting() -> list[Attack]:
    """Return schemas nested further than Python's own JSON writer goes."""

    def body(depth: int, opening: str, closing: str) -> bytes:
        schema = opening * depth + "true" + closing * depth
        form = '{"type": "json_schema", "json_schema": {"name": "s", "schema": ' + schema + "}}"
        return ('{"prompt": "x", "max_tokens": 4, "response_format": ' + form + "}").encode()

    forms = {
        "not": ('{"not": ', "}"),
        "items": ('{"type": "array", "items": ', "}"),
        "properties": ('{"type": "object", "required": ["n"], "properties": {"n": ', "}}"),
    }
    return [
        post(f"{depth} deep, {name}", body(depth, *form), in_short=depth == 950)
        for depth in (100, 450, 950, 5000, 100_000)
        for name, form in forms.items()
    ]


def _many_at_once() -> Attack:
    """Return a dozen different bombs in the same moment, with an honest schema behind them."""

    async def send(wire: Wire) -> list[int]:
        bombs = [
            asking(
                {"type": "string", "allOf": [{"pattern": f".*{letter}.{{5}}b.*"}] * 20 + [{"pattern": ".*z.{6}y.*"}]}
            )
            for letter in "cdefghijklmn"
        ]
        honest = asking({**_HONEST, "title": "behind twelve bombs"})  # type: ignore[dict-item]  # a schema that is a dict
        replies = await asyncio.gather(*(wire.post(COMPLETIONS, body) for body in (*bombs, honest)))
        require(replies[-1].status in (200, 429), f"an honest schema behind bombs got {replies[-1].status}")
        return [status for reply in replies for status in reply.statuses]

    return Attack("12 bombs at once, an honest one behind", send, limit_s=90)


def _same_at_once() -> Attack:
    async def send(wire: Wire) -> list[int]:
        body = asking(_bombs()["25 patterns at once"])
        replies = await asyncio.gather(*(wire.post(COMPLETIONS, body) for _ in range(16)))
        return [status for reply in replies for status in reply.statuses]

    return Attack("the same bomb 16 times", send, limit_s=60)


def _references_are_not_fetched() -> Attack:
    """Return references to other places, one of which would notice being asked."""

    async def send(wire: Wire) -> list[int]:
        asked = asyncio.Event()

        async def notice(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            writer.close()

        listener = await asyncio.start_server(notice, "127.0.0.1", 0)
        async with listener:
            here = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/schema.json"
            places = (here, f"{here}#/a", "file:///etc/passwd", "/etc/passwd", "//127.0.0.1/x", "data:,{}")
            replies = [await wire.post(COMPLETIONS, asking({"$ref": place})) for place in places]
        require(not asked.is_set(), "a schema's reference to another host was followed")
        require(not any(b"root:" in reply.body for reply in replies), "a schema's reference to a file was followed")
        return [status for reply in replies for status in reply.statuses]

    return Attack("references to other hosts and files", send, in_short=True)
