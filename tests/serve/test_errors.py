"""What is wrong with a request is a 4xx that names the field, and never a 5xx."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEXT = {"prompt": "once", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 100000),
        ("max_tokens", -1),
        ("max_tokens", 10**9),
        ("max_tokens", 10**40),
        ("min_tokens", 5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"99999": 1}),
        ("stop_token_ids", [99999]),
        ("seed", 2**70),
        ("seed", "abc"),
        ("stop", 5),
        ("logprobs", 1000),
        ("stream", "perhaps"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frog"}}}),
        ("best_of", 3),
        ("suffix", "tail"),
        ("use_beam_search", True),
        ("tools", [{"type": "function"}]),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ""),
        ("prompt", [99999]),
        ("prompt", [-1]),
        ("prompt", "x" * 2000),
        ("prompt", "\ud800"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(client, field, value):
    content = json.dumps({**TEXT, field: value})
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in f"{error['param']}", error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_chat_is_a_400_that_names_the_field(client, change, field):
    answer = client.post("/v1/chat/completions", json={**CHAT, **change})
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "The body is not JSON (at character 1: Expecting property name enclosed in double quotes)."),
        (b'{"prompt": 5}', "prompt: Input should be a valid string; or: Input should be a valid list"),
        (b'{"prompt": "a", "stop": [' + b'"x",' * 99 + b'"x"]}', "stop: List should have at most 64 items"),
        (b'{"prompt": "a", "max_tokens": "x"}', "max_tokens: Input should be a valid integer"),
        (b'{"prompt": ["a", "b", "c"], "n": 128}', "The request asks for 384 answers; the server takes"),
    ],
)
def test_the_message_says_it_in_the_clients_words(client, content, message):
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(message)


def test_unknown_fields_are_ignored_and_unknown_models_are_not_found(client):
    assert client.post("/v1/completions", json={**TEXT, "user": "me", "frobnicate": 1}).status_code == 200
    answer = client.post("/v1/completions", json={**TEXT, "model": "other"})
    assert answer.status_code == 404
    assert "tiny" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b"{'a': 1}",
        b"[" * 50000,
        b'{"prompt": NaN}',
        b'{"a":' * 9000,
    ],
)
def test_a_body_that_is_no_request_is_a_400(client, content):
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_other_content_types_methods_and_paths_get_their_own_errors(client):
    assert client.post("/v1/completions", content=b"prompt=x").status_code == 415
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    refused = client.post("/v1/completions", content=gzip.compress(b"{}"), headers=packed)
    assert (refused.status_code, "encoded as gzip" in refused.text) == (415, True)
    missing = client.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("kind", [{}, {"Content-Type": "application/json"}])
def test_a_wrong_path_or_method_is_told_as_such_whatever_the_body(client, kind):
    missing = client.post("/chat/completions", content=b"{}", headers=kind)
    assert missing.status_code == 404
    assert "did you mean /v1/chat/completions?" in missing.json()["error"]["message"]
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/v1/models", "GET")):
        wrong = client.request(method, path, headers=kind)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)
        assert wrong.json()["error"]["message"] == f"{path} takes {allowed}, not {method}."


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics"])
def test_head_is_get_without_a_body(client, path):
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", [], "The body must be a JSON object."),
        ("/v1/completions", {**TEXT, "logit_bias": {"a": 1}}, "logit_bias: its names are token ids, and 'a' cannot be"),
        ("/tokenize", {}, "give either prompt or messages"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature: Input"),
        ("/generate", {"input_ids": [[]]}, "input_ids is an empty list."),
    ],
)
def test_errors_have_no_words_of_the_program(client, path, body, message):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(alphabet="\ud800\udfff\x00é漢🙂"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "response_format",
        "speculate",
        "logprobs",
        "top_logprobs",
        "echo",
        "prompt_logprobs",
        "add_special_tokens",
        "tokens",
        "chat_template_kwargs",
        "depth",
        "width",
        "budget",
        "simulated_acceptance",
        "structured_outputs",
        "guided_choice",
        "json_schema",
        "ebnf",
        "tools",
        "tool_choice",
        "thinking",
        "system",
        "input",
        "text",
        "reasoning",
        "previous_response_id",
        "output_config",
        "sampling_params",
        "input_ids",
        "rid",
        "return_logprob",
        "top_logprobs_num",
        "logprob_start_len",
        "continue_final_message",
    ]
)
BODIES = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/generate": {"text": "once", "sampling_params": {"max_new_tokens": 2}},
    "/abort_request": {"rid": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {},
    "/admin/speculation": {},
}


@settings(max_examples=110, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(BODIES)), st.dictionaries(FIELDS, JSON, max_size=4))
def test_no_json_makes_the_server_fail(client, path, changes):
    body = {**BODIES[path], **changes}
    if body.get("simulated_acceptance"):
        del body["simulated_acceptance"]  # a change of mode would reach the other tests
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.status_code, answer.text, body)
