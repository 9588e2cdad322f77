"""What a request gets that leaves something out, and what answers say beside their text."""

import json
from pathlib import Path

import pytest
from tiny_server import EOS, Running, tiny_engine

from slipstream.errors import CheckpointError, ConfigError
from slipstream.serve.defaults import SamplingDefaults, sampling_defaults
from slipstream.serve.fixed_sampling import fixed_sampling

TEXT = {"prompt": "once upon", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def defaults_in(folder: Path, choice: str = "auto", **config: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(choice, folder)


def test_a_models_own_settings_are_the_defaults(tmp_path):
    found = defaults_in(tmp_path, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, do_sample=True)
    assert found == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert found.changed == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


@pytest.mark.parametrize("choice", ["none", "vllm"])
def test_they_can_be_switched_off(tmp_path, choice):
    assert defaults_in(tmp_path, choice, temperature=0.6) == SamplingDefaults()


def test_another_folders_can_be_named(tmp_path):
    defaults_in(tmp_path, temperature=0.3)
    assert sampling_defaults(str(tmp_path), Path("elsewhere")).temperature == 0.3
    with pytest.raises(ConfigError, match=r"has no generation_config\.json"):
        sampling_defaults(str(tmp_path / "absent"), Path("elsewhere"))


def test_a_value_that_is_none_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="top_p is 'high'"):
        defaults_in(tmp_path, top_p="high")


def test_requests_that_leave_settings_out_get_the_servers_defaults(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0}')
    with Running(tiny_engine(), generation_config=str(tmp_path)) as server, server.client() as client:
        plain = {**CHAT, "seed": 1}
        del plain["temperature"]
        texts = [
            client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            for body in (plain, {**plain, "temperature": None}, {**CHAT, "seed": 2})
        ]
        assert texts[0] == texts[1] == texts[2]


def test_an_answer_says_what_ended_it(client):
    whole = client.post("/v1/completions", json=TEXT).json()["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"], whole["matched_stop"]) == ("length", None, None)
    stop = whole["text"][5:7]
    for extra, text in (({}, whole["text"].split(stop)[0]), ({"include_stop_str_in_output": True}, None)):
        cut = client.post("/v1/completions", json={**TEXT, "stop": ["never", stop], **extra}).json()["choices"][0]
        assert (cut["finish_reason"], cut["stop_reason"], cut["matched_stop"]) == ("stop", stop, stop)
        assert cut["text"] == (text if text is not None else whole["text"].split(stop)[0] + stop)
    ids = client.post("/v1/completions", json={**TEXT, "return_token_ids": True}).json()["choices"][0]["token_ids"]
    by_token = client.post("/v1/chat/completions", json={**CHAT, "stop_token_ids": list(range(61))}).json()
    assert by_token["choices"][0]["stop_reason"] == by_token["choices"][0]["matched_stop"] in range(61)
    assert len(ids) == 24


def test_the_models_own_end_token_is_no_stop_reason_but_a_matched_stop(client):
    only_end = {**CHAT, "logit_bias": {str(EOS): 100}, "ignore_eos": False}
    choice = client.post("/v1/chat/completions", json=only_end).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == ("stop", None, EOS)


def test_usage_counts_cached_tokens(client):
    prompt = "x" * 100
    counts = [
        client.post("/v1/completions", json={**TEXT, "prompt": prompt, "cache_salt": salt}).json()["usage"]
        for salt in ("defaults", "defaults", "another")
    ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in counts]
    assert cached[0] == cached[2] == 0
    assert 0 < cached[1] < counts[1]["prompt_tokens"]
    other = client.post("/v1/completions", json={**TEXT, "prompt": prompt, "cache_salt": "defaults", "extra_key": "k"})
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_ids_and_fingerprints_of_answers(client):
    answers = [client.post("/v1/chat/completions", json={**CHAT, **extra}).json() for extra in (
        {}, {"request_id": "mine"}, {"rid": "theirs"},
    )]  # fmt: skip
    assert answers[1]["id"] == "chatcmpl-mine"
    assert answers[2]["id"] == "theirs"
    assert len({answer["system_fingerprint"] for answer in answers}) == 1
    assert answers[0]["system_fingerprint"].startswith("fp_")


def test_a_prompts_tokens_come_once_where_other_servers_have_them(client):
    whole = client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True, "n": 2}).json()
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert not any("prompt_token_ids" in choice for choice in whole["choices"])
    sglang = client.post("/v1/chat/completions", json={**CHAT, "return_prompt_token_ids": True}).json()
    assert sglang["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
    lines = client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True, "stream": True, "n": 2}).text
    events = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [whole["prompt_token_ids"]]


def test_a_prompt_that_is_too_long_can_be_cut(client):
    tokens = list(range(1, 41))
    ask = {**TEXT, "prompt": tokens, "echo": True, "return_token_ids": True}
    left = client.post("/v1/completions", json={**ask, "truncate_prompt_tokens": 5}).json()["choices"][0]
    assert left["prompt_token_ids"] == tokens[-5:]
    cut = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
    assert client.post("/v1/completions", json={**ask, **cut}).json()["choices"][0]["prompt_token_ids"] == tokens[:5]
    longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
    fits = client.post("/v1/completions", json={**TEXT, "prompt": [1] * (longest + 9), "truncate_prompt_tokens": -1})
    assert fits.json()["usage"]["prompt_tokens"] == longest - 24


@pytest.mark.parametrize(
    ("change", "param"), [({"prompt": "x" * 4000}, "prompt"), ({"max_tokens": 100_000}, "max_tokens")]
)
def test_what_does_not_fit_the_context_is_told_by_its_code(client, change, param):
    longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
    error = client.post("/v1/completions", json={**TEXT, **change}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert f"maximum context length is {longest} tokens" in error["message"]


def test_tokens_can_be_named_by_their_ids(client):
    ask = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = client.post("/v1/chat/completions", json={**CHAT, **ask}).json()["choices"][0]
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_chats_prompt_can_be_scored(client):
    answer = client.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 1}).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    ranks = [[one["rank"] for one in entry.values()] for entry in answer["prompt_logprobs"][1:]]
    assert all(first == 1 and all(rank > 1 for rank in more) for first, *more in ranks)
    assert any(more for _, *more in ranks)


def test_echo_keeps_special_tokens_and_offsets(client):
    ask = {**TEXT, "prompt": [EOS, 5, EOS, 6], "echo": True, "logprobs": 0, "max_tokens": 3}
    choice = client.post("/v1/completions", json=ask).json()["choices"][0]
    assert choice["text"].startswith("<eos>")
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    for begin, end, token in zip(offsets, [*offsets[1:], len(choice["text"])], tokens, strict=True):
        assert choice["text"][begin:end] == token


def test_fixed_sampling_refuses_other_settings():
    with Running(tiny_engine(), fixed_sampling=fixed_sampling("kimi")) as server, server.client() as client:
        for field, good, bad in (("temperature", 0.6, 1.1), ("top_p", 0.95, 0.8), ("n", 1, 2)):
            body = {"messages": CHAT["messages"], "max_tokens": 2}
            assert client.post("/v1/chat/completions", json={**body, field: good}).status_code == 200
            refused = client.post("/v1/chat/completions", json={**body, field: bad})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field
    with pytest.raises(ConfigError, match="it knows kimi"):
        fixed_sampling("other")
