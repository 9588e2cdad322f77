"""gpt-oss over HTTP: channels are told apart, forced calls and forms lie on theirs, and a history is rendered."""

import json
from collections.abc import Iterator

import pytest
from tiny_server import Running
from tool_server import GPT_OSS, byte_tokenizer, gpt_oss

from slipstream.serve.tools.chat import Chat, ChatRenderer
from slipstream.serve.tools.harmony import MARKERS

USER = {"role": "user", "content": "How warm is it?"}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"additionalProperties": False}}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with gpt_oss() as served:
        yield served


@pytest.fixture
def brief(server: Running) -> dict:
    """A chat whose analysis ends soon."""
    ids = server.tokenizer.added_token_ids
    return {"messages": [USER], "max_tokens": 300, "seed": 1, "logit_bias": {str(ids["<|end|>"]): 6}}


def test_a_forced_call_is_a_message_to_its_function_behind_the_analysis(client, brief):
    answer = client.post("/v1/chat/completions", json={**brief, "tools": [CLOCK], "tool_choice": "required"})
    [choice] = answer.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("clock", {})
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]


def test_an_answer_to_a_schema_is_the_final_message_alone(client, brief):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answers = {}
    for drafted in (True, False):
        body = {**brief, "response_format": schema, "speculate": drafted}
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert json.loads(message["content"])["city"] in ("Oslo", "Rome")
        answers[drafted] = (message["content"], message["reasoning_content"])
    assert answers[True] == answers[False]


def test_not_to_think_at_all_is_refused(client, brief):
    assert client.post("/v1/chat/completions", json={**brief, "reasoning_effort": "low"}).status_code == 200
    for path, field, value in (
        ("/v1/chat/completions", "reasoning_effort", "none"),
        ("/v1/chat/completions", "thinking", {"type": "disabled"}),
        ("/v1/messages", "thinking", {"type": "disabled"}),
    ):
        answer = client.post(path, json={**brief, field: value})
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]


def test_a_final_message_that_is_gone_on_with_is_text_and_may_have_a_form(client, brief):
    body = {**brief, "messages": [USER, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
    message = client.post("/v1/chat/completions", json={**body, "structured_outputs": {"choice": ["warm", "cold"]}})
    assert message.json()["choices"][0]["message"]["content"] in ("warm", "cold")


def test_a_history_of_calls_and_thoughts_is_what_the_template_takes():
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I need the time."}
    renderer = ChatRenderer(byte_tokenizer(GPT_OSS, MARKERS))
    for content, thought in ((None, "I need the time."), ("One moment.", "I need the time.\nOne moment.")):
        assert renderer.render(Chat([USER, {**asked, "content": content}])).endswith(
            f"<|start|>assistant<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.clock"
            '<|channel|>commentary json<|message|>{"zone": "CET"}<|call|><|start|>assistant'
        )
