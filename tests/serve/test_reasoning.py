"""Reasoning in chats: told apart from the answer or not, streamed or whole, and counted."""

import json
from collections.abc import Iterator

import pytest
from tiny_server import Running, tiny_engine
from tool_server import CHATML, byte_tokenizer, kimi, running

USER = [{"role": "user", "content": "hi"}]
END = "</think>"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with kimi() as served:
        yield served


@pytest.fixture
def thinks(server: Running) -> dict:
    """A chat whose answer thinks for eight tokens, and goes on."""
    bias = {str(server.tokenizer.added_token_ids[END]): 4}
    return {
        "messages": USER,
        "max_tokens": 40,
        "seed": 1,
        "logit_bias": bias,
        "chat_template_kwargs": {"thinking": True},
    }


def asked(client, **body) -> dict:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def deltas(client, **body) -> list[dict]:
    text = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def test_tokens_of_reasoning_are_counted_up_to_its_end(client, server, thinks):
    whole = asked(client, **thinks, return_token_ids=True)
    end = whole["choices"][0]["token_ids"].index(server.tokenizer.added_token_ids[END]) + 1
    assert end == 9
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": end}
    assert whole["usage"]["reasoning_tokens"] == end
    plain = asked(client, **{**thinks, "chat_template_kwargs": {"thinking": False}})
    assert plain["usage"]["reasoning_tokens"] == 0
    cut = asked(client, **{**thinks, "max_tokens": 5})
    assert cut["usage"]["reasoning_tokens"] == 5
    response = client.post(
        "/v1/responses", json={**thinks, "input": USER, "messages": None, "max_tokens": None, "max_output_tokens": 40}
    )
    assert response.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": end}


def test_reasoning_that_is_not_told_apart_stands_in_the_text(client, thinks):
    apart = asked(client, **thinks)["choices"][0]["message"]
    together = asked(client, **thinks, separate_reasoning=False)["choices"][0]["message"]
    assert together["reasoning_content"] is None
    assert together["content"] == apart["reasoning_content"] + END + apart["content"]
    assert all("reasoning_content" in delta for delta in deltas(client, **thinks))  # clients read it of each
    streamed = deltas(client, **thinks, separate_reasoning=False)
    assert "".join(delta.get("content") or "" for delta in streamed) == together["content"]


@pytest.mark.parametrize(
    ("begun", "thinks_on"), [("Well,", False), ("<think>Well,", True), ("<think>Hm</think>W", False)]
)
def test_a_message_that_is_gone_on_with_stands_where_its_own_text_ends(client, server, begun, thinks_on):
    never = {str(token_id): -100 for token_id in server.tokenizer.added_token_ids.values()}
    body = {"messages": [*USER, {"role": "assistant", "content": begun}], "max_tokens": 8, "logit_bias": never}
    message = asked(client, **body, continue_final_message=True)["choices"][0]["message"]
    assert (bool(message["reasoning_content"]), bool(message["content"])) == (thinks_on, not thinks_on)
    blocks = client.post("/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking" if thinks_on else "text"]


@pytest.mark.parametrize("separate", [True, False])
def test_a_stop_string_may_be_a_marker(client, server, thinks, separate):
    at_once = {str(server.tokenizer.added_token_ids[END]): 100}
    body = {**thinks, "logit_bias": at_once, "stop": [END], "separate_reasoning": separate}
    choice = asked(client, **body)["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (None, "")
    assert choice["stop_reason"] == END
    assert not any(delta.get("reasoning_content") or delta.get("content") for delta in deltas(client, **body))


def test_reasoning_that_is_not_streamed_comes_in_one_piece(client, thinks):
    apart = asked(client, **thinks)["choices"][0]["message"]
    for changes in ({}, {"max_tokens": 5}):
        whole = asked(client, **{**thinks, **changes})["choices"][0]["message"]
        streamed = deltas(client, **{**thinks, **changes}, stream_reasoning=False)
        thoughts = [delta["reasoning_content"] for delta in streamed if delta.get("reasoning_content")]
        assert thoughts == [whole["reasoning_content"]]
    assert len([d for d in deltas(client, **thinks) if d.get("reasoning_content")]) > 1
    assert apart["reasoning_content"]


def test_a_text_may_end_inside_the_reasoning(client, server, thinks):
    sampling = {"max_new_tokens": 40, "sampling_seed": 3, "logit_bias": thinks["logit_bias"], "regex": "(ab|cd){2}"}
    answer = client.post(
        "/generate", json={"text": "hi<think>", "sampling_params": sampling, "require_reasoning": True}
    )
    thought, _, said = answer.json()["text"].partition(END)
    assert thought
    assert said.strip() in {"abab", "abcd", "cdab", "cdcd"}
    ids, meta = answer.json()["output_ids"], answer.json()["meta_info"]
    assert meta["reasoning_tokens"] == ids.index(server.tokenizer.added_token_ids[END]) + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "reasoning_effort": "medium"}),
        ("/v1/chat/completions", {"messages": USER, "thinking": {"type": "disabled"}}),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}}),
        ("/v1/messages", {"messages": USER, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ],
)
def test_how_much_to_think_is_nothing_to_a_model_that_does_not(path, body):
    with Running(tiny_engine()) as server, server.client() as client:
        assert client.post(path, json={**body, "max_tokens": 2}).status_code == 200


def test_log_probabilities_of_text_that_was_held_back_come_with_it(client):
    body = {"input": USER, "max_output_tokens": 20, "seed": 1, "include": ["message.output_text.logprobs"]}
    response = client.post("/v1/responses", json=body).json()
    (part,) = response["output"][0]["content"]
    assert len(part["logprobs"]) == response["usage"]["output_tokens"] == 20


def test_a_model_that_cannot_but_think_refuses_not_to():
    tokenizer = byte_tokenizer(CHATML.replace("{{ opening }}", "<think>"), ("<think>", END))
    with running(tokenizer) as server, server.client() as client:
        body = {"messages": USER, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json={**body, "reasoning_effort": "low"}).status_code == 200
        for field, value in (("reasoning_effort", "none"), ("thinking", {"type": "disabled"})):
            answer = client.post("/v1/chat/completions", json={**body, field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
