"""Forced calls over HTTP in syntaxes that are no JSON: valid, exact with any draft, the same when rendered again."""

import json
from collections.abc import Iterator

import pytest
from tiny_server import Running
from tool_server import SYNTAXES, speaking

USER = [{"role": "user", "content": "How warm is it?"}]
PROPERTIES = {
    "city": {"type": "string", "maxLength": 4},
    "days": {"type": "integer", "minimum": 0, "maximum": 9},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": PROPERTIES, "required": ["city", "days"]}},
}


@pytest.fixture(scope="module", params=SYNTAXES)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with speaking(request.param) as served:
        yield served


def test_forced_calls_are_valid_exact_and_rendered_again_as_they_were_written(client, server):
    for seed, many in ((1, True), (2, False)):
        fields = {"messages": USER, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 1500, "seed": seed}
        fields["parallel_tool_calls"] = many
        answers = [
            client.post("/v1/chat/completions", json={**fields, "return_token_ids": True, "speculate": guess}).json()
            for guess in (True, False)
        ]
        (choice,), (plain,) = (answer["choices"] for answer in answers)
        assert choice["token_ids"] == plain["token_ids"]
        assert choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert {"city", "days"} <= set(arguments) <= set(PROPERTIES)
            assert len(arguments["city"]) <= 4 and arguments["days"] in range(10)
            assert set(arguments.get("tags", ["a"])) <= {"a", "b"}
        history = {"messages": [*USER, choice["message"]], "tools": [WEATHER], "add_generation_prompt": False}
        prompt = client.post("/tokenize", json=history).json()["tokens"]
        ends = server.tokenizer.eos_token_ids
        written = server.tokenizer.decode([i for i in choice["token_ids"] if i not in ends], skip_special=False)
        assert spaceless(written) in spaceless(server.tokenizer.decode(prompt, skip_special=False))


def spaceless(text):
    """Return a text without the white space that JSON may have between its parts."""
    return "".join(text.split())
