"""OpenAI's Responses say what chats say, in their own form."""

import json
import math

import pytest
from tiny_server import Running, tiny_engine

ASK = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


def chat_text(client, messages: list[dict], **changes) -> str:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **changes}
    return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def text_of(response: dict) -> str:
    (message,) = response["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    (part,) = message["content"]
    return part["text"]


def events(answer) -> list[dict]:
    pairs = [event.split("\n") for event in answer.text.split("\n\n") if event]
    parsed = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in parsed]
    return parsed


def test_a_response_is_the_chats_answer(client):
    whole = client.post("/v1/responses", json=ASK).json()
    assert text_of(whole) == chat_text(client, [{"role": "user", "content": "hello"}])
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == 12
    raw = client.post("/v1/responses", json={**ASK, "enable_response_messages": True}).json()
    (before,), (after,) = raw["input_messages"], raw["output_messages"]
    assert (before["message"], after["message"]) == ("u:hello\na:", text_of(whole))
    assert (len(before["tokens"]), len(after["tokens"])) == (whole["usage"]["input_tokens"], 12)
    listed = {**ASK, "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]}
    assert text_of(client.post("/v1/responses", json=listed).json()) == text_of(whole)


def test_a_stream_joined_is_the_whole_response(client):
    whole = client.post("/v1/responses", json=ASK).json()
    found = events(client.post("/v1/responses", json={**ASK, "stream": True}))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = list(dict.fromkeys(event["type"] for event in found))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    joined = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert joined == text_of(whole) == text_of(found[-1]["response"])
    assert found[-1]["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_response_goes_on_from_an_earlier_one(client):
    first = client.post("/v1/responses", json={**ASK, "instructions": "be brief"}).json()
    second = client.post("/v1/responses", json={**ASK, "input": "go on", "previous_response_id": first["id"]}).json()
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text_of(first)}]
    assert text_of(second) == chat_text(client, [*history, {"role": "user", "content": "go on"}])
    assert client.get(f"/v1/responses/{first['id']}").json() == first
    asked = client.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert asked[0]["content"] == [{"type": "input_text", "text": "go on"}]
    assert client.post(f"/v1/responses/{first['id']}/cancel").status_code == 400
    assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert client.get(f"/v1/responses/{first['id']}").status_code == 404
    again = client.post("/v1/responses", json={**ASK, "previous_response_id": first["id"]})
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "previous_response_id"
    assert again.json()["error"]["code"] == "previous_response_not_found"


def test_a_response_is_kept_for_who_asked_and_only_if_it_may_be():
    with Running(tiny_engine(), api_keys=("mine", "theirs")) as server:
        with server.client(headers={"Authorization": "Bearer mine"}) as client:
            kept = client.post("/v1/responses", json=ASK).json()["id"]
            unkept = client.post("/v1/responses", json={**ASK, "store": False}).json()["id"]
            assert client.get(f"/v1/responses/{unkept}").status_code == 404
            assert client.get(f"/v1/responses/{kept}").status_code == 200
        with server.client(headers={"Authorization": "Bearer theirs"}) as client:
            assert client.get(f"/v1/responses/{kept}").status_code == 404
            assert client.delete(f"/v1/responses/{kept}").status_code == 404


def test_the_text_keeps_to_a_schema(client):
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = client.post("/v1/responses", json={**ASK, "max_output_tokens": 60, "ignore_eos": False, "text": form})
    assert json.loads(text_of(response.json()))["a"] in (1, 22)
    assert response.json()["status"] == "completed"


def test_log_probabilities_come_with_the_text(client):
    body = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.post("/v1/responses", json=body).json()["output"][0]["content"][0]["logprobs"]
    assert len(whole) == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x" * 3000}, "input"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "frog"}}}}, "text.format.schema"),
        ({"n": 2}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(client, change, field):
    answer = client.post("/v1/responses", json={**ASK, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": "\ud800"}, "input"),
        ({"input": [{"role": "user", "content": "a", "x": "\ud800"}]}, "input"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"maximum": math.inf}}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "\ud800"}}, "tool_choice"),
        ({"text": {"format": {"type": "text", "schema": {"default": math.nan}}}}, "text"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_response_could_not_repeat_is_a_400_that_names_the_field(client, change, field, stream):
    content = json.dumps({**ASK, "stream": stream, **change})
    answer = client.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
