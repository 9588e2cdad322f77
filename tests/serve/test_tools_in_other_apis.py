"""Tools and reasoning in Responses and Messages: what chat completions say, in each API's form."""

import json
from collections.abc import Iterator

import httpx
import pytest
from tiny_server import Running
from tool_server import kimi

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMED = {"name": "weather", "description": "Tells the weather."}
CHAT = {"tools": [{"type": "function", "function": {**NAMED, "parameters": SCHEMA}}], "tool_choice": "required"}
CHAT |= {"parallel_tool_calls": False}
RESPONSE = {"tools": [{"type": "function", **NAMED, "parameters": SCHEMA}], "tool_choice": "required"}
RESPONSE |= {"parallel_tool_calls": False}
ONE = {"type": "any", "disable_parallel_tool_use": True}
MESSAGE = {"tools": [{**NAMED, "input_schema": SCHEMA}], "tool_choice": ONE}
ONCE = {"seed": 3, "temperature": 1}
CALL = {"id": "c1", "name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
RESULT = "7 degrees"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with kimi() as served:
        yield served


def asked(client: httpx.Client, path: str, **body: object) -> dict:
    answer = client.post(path, json={"max_tokens": 300, **ONCE, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: httpx.Client, path: str, **body: object) -> list[dict]:
    text = client.post(path, json={"max_tokens": 300, **ONCE, **body, "stream": True}).text
    return [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in text.split("\n\n") if event]


def chat_message(client: httpx.Client, **body: object) -> dict:
    return asked(client, "/v1/chat/completions", **body)["choices"][0]["message"]


def test_a_forced_call_is_the_same_in_every_api(client):
    user = [{"role": "user", "content": "How warm is it?"}]
    (call,) = chat_message(client, messages=user, **CHAT)["tool_calls"]
    expected = json.loads(call["function"]["arguments"])
    response = asked(client, "/v1/responses", input="How warm is it?", **RESPONSE)
    (item,) = response["output"]
    assert (item["type"], item["name"], item["call_id"]) == ("function_call", "weather", call["id"])
    assert item["arguments"] == call["function"]["arguments"]
    message = asked(client, "/v1/messages", messages=user, **MESSAGE)
    (block,) = message["content"]
    assert block == {"type": "tool_use", "id": call["id"], "name": "weather", "input": expected}
    assert message["stop_reason"] == "tool_use"


def test_streamed_calls_joined_are_the_whole_ones(client):
    user = [{"role": "user", "content": "How warm is it?"}]
    whole = asked(client, "/v1/responses", input="How warm is it?", **RESPONSE)["output"]
    events = streamed(client, "/v1/responses", input="How warm is it?", **RESPONSE)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["name"], item["arguments"]) for item in done] == [(i["name"], i["arguments"]) for i in whole]
    for place, item in enumerate(whole):
        kind = "response.function_call_arguments.delta"
        deltas = [event["delta"] for event in events if event["type"] == kind and event["output_index"] == place]
        assert "".join(deltas) == item["arguments"]
        assert len(deltas) > 1
    blocks = asked(client, "/v1/messages", messages=user, **MESSAGE)["content"]
    events = streamed(client, "/v1/messages", messages=user, **MESSAGE)
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(block["type"], block["name"]) for block in begun] == [(b["type"], b["name"]) for b in blocks]
    for place, block in enumerate(blocks):
        own = [e for e in events if e["type"] == "content_block_delta" and e["index"] == place]
        assert json.loads("".join(event["delta"]["partial_json"] for event in own)) == block["input"]


def test_a_history_of_calls_and_thoughts_is_the_same_prompt_in_every_api(client):
    function = {"name": CALL["name"], "arguments": CALL["arguments"]}
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I should look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        {"role": "user", "content": "And so?"},
    ]
    items = [
        {"role": "user", "content": "How warm?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I should look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call_output", "call_id": "c1", "output": RESULT},
        {"role": "user", "content": [{"type": "input_text", "text": "And so?"}]},
    ]
    blocks = [
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(CALL["arguments"])},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": RESULT}]},
                {"type": "text", "text": "And so?"},
            ],
        },
    ]
    short = {"max_tokens": 40}
    chat = asked(client, "/v1/chat/completions", messages=history, **short)
    response = asked(client, "/v1/responses", input=items, instructions="Be brief.", **short)
    message = asked(client, "/v1/messages", messages=blocks, system="Be brief.", **short)
    said = chat["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == said
    assert message["content"] == [{"type": "text", "text": said}]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = client.post("/v1/messages/count_tokens", json={"messages": blocks, "system": "Be brief."}).json()
    assert counted["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_thoughts_have_items_and_blocks_of_their_own(client):
    user = [{"role": "user", "content": "Think."}]
    thinks = {"chat_template_kwargs": {"thinking": True}, "max_tokens": 30}
    thought = chat_message(client, messages=user, **thinks)["reasoning_content"]
    assert thought
    (item,) = asked(client, "/v1/responses", input="Think.", **thinks)["output"]
    assert item["type"] == "reasoning"
    assert item["content"] == [{"type": "reasoning_text", "text": thought}]
    message = asked(client, "/v1/messages", messages=user, thinking={"type": "enabled"}, max_tokens=30)
    assert message["content"] == [{"type": "thinking", "thinking": thought, "signature": ""}]
    events = streamed(client, "/v1/messages", messages=user, thinking={"type": "enabled"}, max_tokens=30)
    deltas = [event["delta"]["thinking"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == thought


def test_a_response_with_a_call_is_gone_on_from_with_its_result(client):
    first = asked(client, "/v1/responses", input="How warm?", **RESPONSE)
    (call,) = first["output"]
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}]
    more = {**RESPONSE, "tool_choice": "auto", "previous_response_id": first["id"], "max_tokens": 4}
    second = asked(client, "/v1/responses", input=result, **more)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]


def test_functions_of_a_namespace_are_called_by_it(client):
    group = {"type": "namespace", "name": "sky", "description": "-", "tools": RESPONSE["tools"]}
    asks = {**RESPONSE, "tools": [group], "input": "How warm?"}
    first = asked(client, "/v1/responses", **asks)
    (call,) = first["output"]
    assert (call["namespace"], call["name"]) == ("sky", "weather")
    done = [event["item"] for event in streamed(client, "/v1/responses", **asks) if event["type"].endswith("item.done")]
    assert [(item["namespace"], item["name"]) for item in done] == [("sky", "weather")]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    history = [{"role": "user", "content": "How warm?"}, call, result]
    more = {"max_tokens": 2, "tool_choice": "auto"}
    kept = asked(client, "/v1/responses", **{**asks, **more, "input": [result], "previous_response_id": first["id"]})
    sent = asked(client, "/v1/responses", **{**asks, **more, "input": history})
    assert kept["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
    wrong = {**asks, "tools": [{**group, "tools": [{"type": "custom", "name": "x"}]}]}
    assert client.post("/v1/responses", json=wrong).json()["error"]["param"] == "tools[0].tools[0]"


def test_a_response_calls_only_the_tools_that_its_choice_allows(client):
    clock = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
    listed = {"mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    for choice in ({"type": "allowed_tools", **listed}, {"type": "allowed_tools", "allowed_tools": listed}):
        asks = {**RESPONSE, "tools": [clock, *RESPONSE["tools"]], "tool_choice": choice}
        response = asked(client, "/v1/responses", input="How warm?", **asks)
        assert [item["name"] for item in response["output"]] == ["weather"]
        assert response["tool_choice"] == choice
    wrong = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "calendar"}]}
    answer = client.post("/v1/responses", json={"input": "How warm?", **RESPONSE, "tool_choice": wrong})
    assert answer.json()["error"]["param"] == "tool_choice"
