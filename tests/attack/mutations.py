"""Bodies nobody thought of: good ones, changed in a few places by a seeded draw."""

import copy
import json
import random
from typing import Any

from tests.attack.kinds import ANY, CHAT, COMPLETIONS, Attack
from tests.attack.wire import Wire

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]}
_FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}}
_SHARED = {
    "model": None, "stream": False, "n": 2, "max_tokens": 3, "min_tokens": 1, "temperature": 0.7, "top_p": 0.9,
    "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1}, "seed": 1, "stop": ["zz"], "stop_token_ids": [3], "ignore_eos": False,
    "response_format": _FORM, "speculate": True, "stream_options": {"include_usage": True}, "return_tokens": True,
    "return_token_ids": True, "cache_salt": "s", "speculation_stats": True, "skip_special_tokens": True, "user": "u",
}  # fmt: skip
_GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {**_SHARED, "prompt": ["one", "two"], "logprobs": 2, "prompt_logprobs": 1, "echo": True},
    CHAT: {
        **_SHARED,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"x": 1},
        "max_completion_tokens": 3,
    },
    "/tokenize": {"prompt": "some text", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3], "skip_special_tokens": False},
}
_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 127, 128, 129, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.0, -0.0, 1e-38,
    5e-324, 1e308, 0.5, "", " ", "x", "1", "-1", "1e5", "true", "null", "\x00", "\ud800", "\n", "x" * 5000, "{{1}}",
    "#", "$ref", [], [None], [[]], [0], ["a"], [1, "a"], [[1], ["a"]], {}, {"a": 1}, {"": ""}, {"type": "object"},
    {"$ref": "#"}, {"type": "text"}, {"type": "json_object"}, {"0": 100}, [-1], [1e9], [[[[[1]]]]], ["a"] * 50,
    {"role": "x"}, [{"role": "user", "content": "x"}],
)  # fmt: skip


def attacks(seed: int, count: int, num_short: int = 0) -> list[Attack]:
    """Return `count` changed bodies; the first few belong to the short form."""
    draw = random.Random(seed)
    return [_mutant(draw, number, number < num_short) for number in range(count)]


def _mutant(draw: random.Random, number: int, in_short: bool) -> Attack:
    path = draw.choices(list(_GOOD), (5, 5, 1, 1))[0]
    good = copy.deepcopy(_GOOD[path])
    kept = {name: value for name, value in good.items() if draw.random() < 0.4 or name in _NEEDED}
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        _change(draw, kept)
    kept.setdefault("max_tokens", 3)  # else an answer is as long as the context, and one shard of luck costs minutes
    content = _garble(draw, json.dumps(kept).encode())

    async def send(wire: Wire) -> list[int]:
        return (await wire.post(path, content)).statuses

    return Attack(f"mutant {number}: {content[:400]!a}", send, ANY, 60, in_short)


_NEEDED = ("prompt", "messages", "tokens", "max_tokens")


def _change(draw: random.Random, node: Any) -> None:  # any JSON
    """Change one place of a body, somewhere below `node`."""
    while isinstance(node, dict | list) and node:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        deeper = node[key]
        if isinstance(deeper, dict | list) and deeper and draw.random() < 0.6:
            node = deeper
            continue
        _replace(draw, node, key)
        return


def _replace(draw: random.Random, node: Any, key: Any) -> None:  # a list or an object, and a key of it
    kind = draw.random()
    if kind < 0.65:
        node[key] = copy.deepcopy(draw.choice(_ODD))
    elif kind < 0.75:
        del node[key]
    elif kind < 0.85:
        node[key] = [node[key]]
    elif kind < 0.95 and isinstance(node, dict):
        node[str(key) + draw.choice(("", " ", "\x00", "s", "_"))] = copy.deepcopy(draw.choice(_ODD))
    else:
        node[key] = {"a": node[key]}


def _garble(draw: random.Random, content: bytes) -> bytes:
    """Now and then cut a body short, or change a byte of it."""
    kind = draw.random()
    if kind < 0.03:
        return content[: draw.randrange(len(content))]
    if kind < 0.06:
        place = draw.randrange(len(content))
        return content[:place] + draw.randbytes(1) + content[place + 1 :]
    return content
