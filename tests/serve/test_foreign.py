"""The small routes that vLLM's and SGLang's clients call."""

import json
import threading

import pytest
from tiny_server import Running, tiny_engine

LONG = {"prompt": "once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def cached_tokens(server: Running) -> int:
    return server.on_engine(lambda engine: engine.stats.cached_tokens)


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_a_flushed_cache_has_no_prompts_and_the_same_answers(client, server, path):
    body = {"prompt": "once upon a time there was a long prompt" * 3, "max_tokens": 4, "temperature": 0}
    first = client.post("/v1/completions", json=body).json()["choices"]
    assert client.post(path).status_code == 200
    before = cached_tokens(server)
    assert client.post("/v1/completions", json=body).json()["choices"] == first
    assert cached_tokens(server) == before
    assert client.post("/v1/completions", json=body).json()["choices"] == first
    assert cached_tokens(server) > before


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_a_web_page_cannot_flush_the_cache(client, headers):
    assert client.post("/flush_cache", headers=headers).status_code == 403
    assert client.get("/flush_cache", headers=headers).status_code == 403


def test_the_model_describes_itself(client):
    assert client.get("/get_model_info").json()["is_generation"] is True
    assert client.get("/model_info").json()["model_path"] == "tiny"
    room = client.get("/get_server_info").json()
    assert room["max_total_num_tokens"] >= room["context_length"] == 128
    assert client.get("/tokenizer_info").json()["eos_token"] == "<eos>"
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/get_load").json()[0]["num_reqs"] == 0
    assert client.get("/health_generate").status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "named", "status"),
    [
        ("/v1/completions", LONG, {"rid": "job-7"}, 200),
        ("/v1/completions", {**LONG, "rid": "mine"}, {"rid": "mine"}, 200),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": None}, "rid": "r"}, {"rid": "r"}, 200),
        ("/v1/responses", {"input": "a"}, {"rid": "job-7"}, 499),
    ],
)
def test_an_answer_ends_when_its_own_client_aborts_it_by_name(route, body, named, status):
    mine = {"Authorization": "Bearer mine", "X-Request-ID": "job-7"}
    with Running(tiny_engine(), api_keys=("mine", "theirs")) as server, server.client(headers=mine) as client:
        resume = threading.Event()
        held = threading.Thread(target=server.on_engine, args=[lambda _: resume.wait(60)])
        found: list = []
        post = threading.Thread(target=lambda: found.append(client.post(route, json=body)))
        held.start()
        post.start()
        try:
            with server.client(headers=mine) as other:
                while other.get("/load").json()["server_load"] == 0:
                    assert post.is_alive()
                theirs = {"x-api-key": "theirs", "Authorization": ""}
                assert other.post("/abort_request", json=named, headers=theirs).json() == {"aborted": 0}
                assert other.post("/abort_request", json={"abort_all": True}).status_code == 403
                assert other.post("/abort_request", json=named).json() == {"aborted": 1}
                post.join()
                assert found[0].status_code == status
                assert ending(found[0].json()) == "abort" if status == 200 else "error" in found[0].json()
        finally:
            resume.set()
            held.join()
        server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rid", "named", "expected"),
    [
        (["x", "y"], "x", ["abort", "length"]),
        ("both", "both_1", ["length", "abort"]),
        ("both", "both", ["abort", "abort"]),
    ],
)
def test_an_abort_ends_one_answer_of_a_batch_by_its_own_name_and_all_by_the_batchs(stream, rid, named, expected):
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    body = {"text": ["once", "upon"], "rid": rid, "sampling_params": sampling, "stream": stream}
    with Running(tiny_engine()) as server, server.client() as client:
        resume = threading.Event()
        held = threading.Thread(target=server.on_engine, args=[lambda _: resume.wait(60)])
        found: list = []
        post = threading.Thread(target=lambda: found.append(client.post("/generate", json=body)))
        held.start()
        post.start()
        try:
            with server.client() as other:
                while other.get("/load").json()["server_load"] == 0:
                    assert post.is_alive()
                assert other.post("/abort_request", json={"rid": named}).json() == {"aborted": 1}
        finally:
            resume.set()
            held.join()
            post.join()
        server.wait_idle()
    answers = found[0].json() if not stream else last_events(found[0].text)
    assert [ending(answer) for answer in answers] == expected
    assert [len(answer["output_ids"]) for answer in answers] == [0 if end == "abort" else 20 for end in expected]


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_server_behind_a_prefix_answers_with_it_and_without(prefix):
    with Running(tiny_engine(), root_path="/llm", api_keys=("k",)) as server, server.client() as client:
        assert client.get(f"{prefix}/health").status_code == 200
        assert client.get(f"{prefix}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert client.get(f"{prefix}/v1/models", headers=headers).status_code == 200
        assert client.get(f"{prefix}/openapi.json", headers=headers).json()["servers"] == [{"url": "/llm"}]
        # Its pages call what lies beside them, wherever that is.
        assert 'fetch("/' not in client.get(f"{prefix}/").text
        assert "href=/" not in client.get(f"{prefix}/docs").text


def test_tokens_come_as_the_vocabulary_has_them_where_that_is_asked_for(client):
    found = client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert found["token_strs"] == ["a", "Ġ", "b"]
    assert client.post("/tokenize", json={"prompt": "a b"}).json()["token_strs"] is None


def test_several_texts_are_tokenized_and_given_back_in_lists(client):
    found = client.post("/v1/tokenize", json={"prompt": ["ab", "c"], "return_token_strs": True}).json()
    assert (found["count"], found["token_strs"]) == ([2, 1], [["a", "b"], ["c"]])
    for tokens, text in ((found["tokens"], ["ab", "c"]), (found["tokens"][0], "ab"), ([], "")):
        back = client.post("/detokenize", json={"tokens": tokens}).json()
        assert back == {"prompt": text, "text": text}


def ending(answer: dict) -> str:
    """Return why an answer ended, in the words of its API."""
    return (
        answer["choices"][0]["finish_reason"] if "choices" in answer else answer["meta_info"]["finish_reason"]["type"]
    )


def last_events(text: str) -> list[dict]:
    """Return the last event of each answer of a stream, by its place."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    last = {event["index"]: event for event in events}
    return [last[index] for index in sorted(last)]
