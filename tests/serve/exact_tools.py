"""Tools, forced calls, schemas and reasoning give the same tokens with a chain, a tree and no draft.

PYTHONPATH=src:tests:tests/serve python tests/serve/exact_tools.py 300 [FAMILY]: kimi, gpt_oss, glm45, ...
"""

import functools
import random
import sys
from typing import Any

from tool_server import SYNTAXES, gpt_oss, kimi, speaking

from slipstream.speculation.tree import TreeShape

TREES = {"chain": TreeShape.chain(4), "tree": TreeShape(depth=3, width=3, budget=9)}
SERVERS = {"kimi": kimi, "gpt_oss": gpt_oss, **{name: functools.partial(speaking, name) for name in SYNTAXES}}
CITY = {"type": "string", "maxLength": 8}


def request(seed: int) -> dict[str, Any]:
    """Return one of many requests."""
    chance = random.Random(seed)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters(chance), "strict": strict}}
        for name, strict in (("weather", True), ("search", False))
    ]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Question {seed}?"}],
        "max_tokens": 48,
        "seed": seed,
        "temperature": chance.choice((0, 0.7, 1.0)),
        "return_token_ids": True,
        "chat_template_kwargs": {"thinking": chance.random() < 0.5},
    }
    kind = chance.choice(("tools", "required", "named", "schema", "schema and tools", "plain"))
    if "tools" in kind or kind in ("required", "named"):
        body["tools"] = tools
    if kind == "required":
        body["tool_choice"] = "required"
    if kind == "named":
        body["tool_choice"] = {"type": "function", "function": {"name": "search"}}
    if "schema" in kind:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters(chance)}}
    return body


def parameters(chance: random.Random) -> dict[str, Any]:
    """Return a schema of arguments."""
    kinds = {"city": CITY, "days": {"type": "integer"}, "exact": {"type": "boolean"}, "unit": {"enum": ["C", "F"]}}
    names = chance.sample(sorted(kinds), chance.randint(1, 4))
    properties = {name: kinds[name] for name in names}
    return {"type": "object", "properties": properties, "required": names[:1], "additionalProperties": False}


def main(count: int, family: str = "kimi") -> int:
    """Compare; returns how many answers differ."""
    answers: dict[str, list[list[int]]] = {}
    for name, tree in TREES.items():
        with SERVERS[family](tree) as server, server.client() as client:
            for kind, guess in ((name, True), ("none", False)) if name == "chain" else ((name, True),):
                answers[kind] = []
                for seed in range(count):
                    answer = client.post("/v1/chat/completions", json={**request(seed), "speculate": guess})
                    assert answer.status_code == 200, answer.text
                    answers[kind].append(answer.json()["choices"][0]["token_ids"])
    different = sum(len({tuple(kind[i]) for kind in answers.values()}) > 1 for i in range(count))
    sys.stdout.write(f"{count} requests, {', '.join(answers)}: {different} differ\n")
    return different


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]) > 0)
