"""Anthropic's Messages say what chats say, in their own form."""

import json

import pytest
from tiny_server import Running, tiny_engine

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
ASK |= {"ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


def chat_text(client, messages: list[dict], **changes) -> str:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **changes}
    return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def events(answer) -> list[dict]:
    pairs = [event.split("\n") for event in answer.text.split("\n\n") if event]
    parsed = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in parsed]
    return parsed


def test_a_message_is_the_chats_answer(client):
    message = client.post("/v1/messages", json={**ASK, "system": [{"type": "text", "text": "be brief"}]}).json()
    history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert message["content"] == [{"type": "text", "text": chat_text(client, history)}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert message["usage"]["output_tokens"] == 12
    stop = message["content"][0]["text"][4:6]
    cut = client.post("/v1/messages", json={**ASK, "system": "be brief", "stop_sequences": [stop]}).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)


def test_a_stream_joined_is_the_whole_message(client):
    whole = client.post("/v1/messages", json=ASK).json()
    found = events(client.post("/v1/messages", json={**ASK, "stream": True}))
    kinds = list(dict.fromkeys(event["type"] for event in found))
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    joined = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
    assert joined == whole["content"][0]["text"]
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_tokens_from_the_cache_are_counted_apart_from_a_streams_beginning_on(client):
    counted = client.post("/v1/messages/count_tokens", json={"messages": ASK["messages"]}).json()["input_tokens"]
    for _ in range(2):
        found = events(client.post("/v1/messages", json={**ASK, "stream": True}))
    for usage in (found[0]["message"]["usage"], found[-2]["usage"]):
        assert usage["cache_read_input_tokens"] > 0
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


def test_blocks_are_read_as_turns_and_results(client):
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "well"}]},
        {"role": "user", "content": "so"},
    ]
    plain = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
    plain.append({"role": "user", "content": "so"})
    said = client.post("/v1/messages", json={**ASK, "messages": blocks}).json()["content"][0]["text"]
    assert said == chat_text(client, plain)


def test_an_answer_goes_on_where_the_assistants_last_turn_ends(client, server):
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well, i"}]
    said = client.post("/v1/messages", json={**ASK, "messages": begun}).json()["content"][0]["text"]
    prompt = {"prompt": "u:hello\na:well, i", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    assert said == client.post("/v1/completions", json=prompt).json()["choices"][0]["text"]


def test_the_text_keeps_to_a_schema(client):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {**ASK, "max_tokens": 60, "ignore_eos": False, "output_config": form}
    message = client.post("/v1/messages", json=body).json()
    assert json.loads(message["content"][0]["text"])["a"] in (1, 22)
    assert message["stop_reason"] == "end_turn"


def test_tokens_are_counted_as_an_answer_counts_them(client):
    body = {"model": "tiny", "messages": ASK["messages"], "system": "be brief"}
    counted = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    usage = client.post("/v1/messages", json={**ASK, "system": "be brief"}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_tokens_are_counted_of_prompts_that_are_longer_than_the_context(client, server):
    messages = [{"role": "user", "content": "x" * 3000}]
    counted = client.post("/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"]
    assert counted == client.post("/tokenize", json={"messages": messages}).json()["count"]
    assert counted > server.engine.config.max_context


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 100000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "frog"}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field_in_anthropics_form(client, change, field):
    body = {name: value for name, value in {**ASK, **change}.items() if value is not None}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    said = answer.json()
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert field in said["error"]["message"]


def test_every_refusal_has_anthropics_form():
    with Running(tiny_engine(), api_keys=("k",), max_body_bytes=2000) as server, server.client() as client:
        assert client.post("/v1/messages", json=ASK).json()["error"]["type"] == "authentication_error"
        key = {"x-api-key": "k"}
        assert client.post("/v1/messages", json=ASK, headers=key).status_code == 200
        other = client.post("/v1/messages", json={**ASK, "model": "other"}, headers=key)
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
        large = client.post("/v1/messages", json={**ASK, "system": "x" * 3000}, headers=key)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
