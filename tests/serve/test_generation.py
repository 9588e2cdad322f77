"""Chats and completions, whole and streamed, say what the engine says."""

import json

import httpx
import pytest
from tiny_server import tiny_engine

from slipstream.speculation.sampling import SamplingParams, derive_seed

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "seed": 7}
TEXT = {"model": "tiny", "prompt": "once upon", "max_tokens": 24, "seed": 7, "ignore_eos": True}


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def offline(server, text_or_ids, params: SamplingParams, seed: int, **options) -> tuple[str, list[int]]:
    """Answer with a fresh engine like the server's, outside the server."""
    ids = server.tokenizer.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    engine = tiny_engine()
    detokenizer = server.tokenizer.detokenizer()
    engine.add(ids, params, seed, server.tokenizer.eos_token_ids, detokenizer, **options)
    found = []
    while engine.has_work:
        found += engine.step()
    return "".join(e.text for e in found), [t.token_id for e in found for t in e.tokens]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_completion_is_the_offline_engines_text_for_its_seed(client, server, temperature):
    answer = client.post("/v1/completions", json={**TEXT, "temperature": temperature}).json()
    params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
    text, ids = offline(server, "once upon", params, 7)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "length"
    counts = {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)}
    assert answer["usage"].items() >= counts.items()


def test_a_chat_renders_the_template_and_answers_as_the_assistant(client, server):
    answer = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0.5}).json()
    text, _ = offline(server, "u:hello\na:", SamplingParams(max_tokens=24, temperature=0.5), 7)
    assert answer["object"] == "chat.completion"
    said = {"role": "assistant", "content": text, "refusal": None, "reasoning_content": None}
    assert answer["choices"][0]["message"] == said


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_joined_is_the_whole_answer(client, path):
    body = TEXT if path == "/v1/completions" else {**CHAT, "ignore_eos": True}
    whole = client.post(path, json=body).json()
    parts = events(client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}))
    choices = [part["choices"][0] for part in parts[:-1]]
    if path == "/v1/completions":
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    else:
        assert choices[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
        joined = "".join(choice["delta"].get("content", "") for choice in choices)
        assert joined == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    assert len({part["id"] for part in parts}) == 1


def test_a_stream_without_include_usage_has_no_usage(client):
    parts = events(client.post("/v1/completions", json={**TEXT, "stream": True}))
    assert all("usage" not in part and part["choices"] for part in parts)


def test_n_answers_differ_and_each_is_that_of_its_derived_seed(client, server):
    body = {**TEXT, "n": 3, "temperature": 1.5}
    answer = client.post("/v1/completions", json=body).json()
    params = SamplingParams(max_tokens=24, temperature=1.5, ignore_eos=True)
    expected = [offline(server, "once upon", params, derive_seed(7, index))[0] for index in range(3)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert len(set(expected)) == 3
    assert answer["usage"]["prompt_tokens"] == 9
    parts = events(client.post("/v1/completions", json={**body, "stream": True}))
    for index in range(3):
        texts = [p["choices"][0]["text"] for p in parts if p["choices"][0]["index"] == index]
        assert "".join(texts) == expected[index]


def test_several_prompts_as_texts_or_tokens_are_answered_in_order(client, server):
    texts = ["one", "two two", "3"]
    ids = [server.tokenizer.encode(text) for text in texts]
    by_text = client.post("/v1/completions", json={**TEXT, "prompt": texts}).json()
    by_ids = client.post("/v1/completions", json={**TEXT, "prompt": ids}).json()
    single = client.post("/v1/completions", json={**TEXT, "prompt": ids[1]}).json()
    assert [c["text"] for c in by_text["choices"]] == [c["text"] for c in by_ids["choices"]]
    assert by_ids["choices"][1]["text"] == single["choices"][0]["text"]
    assert by_ids["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_speculation_can_be_turned_off_for_a_request_and_changes_nothing_but_statistics(client):
    body = {**TEXT, "temperature": 0.7, "speculation_stats": True, "return_token_ids": True}
    on = client.post("/v1/completions", json=body).json()
    off = client.post("/v1/completions", json={**body, "speculate": False}).json()
    assert on["choices"][0]["token_ids"] == off["choices"][0]["token_ids"]
    assert off["usage"]["speculation"]["drafted"] == 0
    assert off["usage"]["speculation"]["acceptance_length"] == 1.0
    found = on["usage"]["speculation"]
    assert found["accepted"] > 0
    assert found["accepted"] == sum(found["accepted_by_position"])
    assert found["acceptance_length"] == pytest.approx(23 / (found["passes"] - 1), abs=1e-3)
    assert found["simulated"] is False


def test_tokens_tell_where_the_draft_guessed_them(client):
    parts = events(client.post("/v1/completions", json={**TEXT, "stream": True, "return_tokens": True}))
    for part in parts:
        choice = part["choices"][0]
        positions = [token["draft_position"] for token in choice["tokens"]]
        assert positions[:-1] == list(range(1, len(positions)))
        assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    assert any(token["draft_position"] for part in parts for token in part["choices"][0]["tokens"])


def test_chat_logprobs_name_the_likeliest_tokens(client):
    answer = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 3})
    content = answer.json()["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])  # greedy takes the best
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_echo_with_logprobs_scores_the_prompt_as_evaluation_tools_expect(client, server):
    body = {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("once upon")
    assert logprobs["tokens"][:9] == list("once upon")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(
        value <= max(top.values())
        for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    )
    assert logprobs["text_offset"][:10] == list(range(10))
    assert len(logprobs["tokens"]) == 10


def test_a_prompt_can_be_scored_without_an_answer(client):
    body = {**TEXT, "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "once upon"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 9
    assert answer["usage"]["completion_tokens"] == 0


def test_a_stop_string_ends_the_answer_before_it(client):
    whole = client.post("/v1/completions", json={**TEXT, "temperature": 0}).json()["choices"][0]["text"]
    stop = whole[5:7]
    cut = client.post("/v1/completions", json={**TEXT, "temperature": 0, "stop": [stop, "never"]}).json()["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_json_mode_answers_with_json_with_and_without_speculation(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["yes", "no"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {**CHAT, "max_tokens": 100, "temperature": 1, "response_format": wanted}
    for seed in range(4):
        on = client.post("/v1/chat/completions", json={**body, "seed": seed}).json()["choices"][0]
        off = client.post("/v1/chat/completions", json={**body, "seed": seed, "speculate": False}).json()["choices"][0]
        assert on["message"] == off["message"]
        assert on["finish_reason"] == "stop"
        parsed = json.loads(on["message"]["content"])
        assert parsed["b"] in ("yes", "no")
        assert set(parsed) == {"a", "b"}


def test_a_chat_goes_on_with_its_last_message_if_asked_to(client):
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well,  "}]
    body = {**CHAT, "messages": begun, "temperature": 0, "ignore_eos": True, "continue_final_message": True}
    said = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    plain = {**TEXT, "prompt": "u:hello\na:well,  ", "temperature": 0}
    assert said == client.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    for wrong in ({"messages": begun[:1]}, {"add_generation_prompt": True}):
        refused = client.post("/v1/chat/completions", json={**body, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


def test_a_stream_gives_the_prompts_tokens_once_for_each_choice(client, server):
    asked = {**TEXT, "max_tokens": 40, "n": 2, "stream": True, "return_token_ids": True, "temperature": 1}
    choices = [choice for event in events(client.post("/v1/completions", json=asked)) for choice in event["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert len(own) > 1
        assert own[0]["prompt_token_ids"] == server.tokenizer.encode("once upon")
        assert not any("prompt_token_ids" in choice for choice in own[1:])
        assert sum(len(choice["token_ids"]) for choice in own) == 40
