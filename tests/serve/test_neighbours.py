"""A request that cannot be answered fails alone: over HTTP its neighbours get the text they get by themselves."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_server import Running, tiny_engine

HONEST = {"prompt": "once upon", "max_tokens": 40, "ignore_eos": True, "seed": 3, "temperature": 1}
CONSTANT = {"type": "json_schema", "json_schema": {"schema": {"const": "a"}}}


def text(client, body):
    return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_a_grammar_whose_only_token_min_tokens_forbids_ends_its_answer_and_hurts_nobody(client):
    alone = text(client, HONEST)
    forced = {"prompt": "a", "max_tokens": 30, "min_tokens": 20, "response_format": CONSTANT}
    with ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(text, client, HONEST) for _ in range(4)]
        answers = [pool.submit(client.post, "/v1/completions", json=forced) for _ in range(4)]
    assert {neighbour.result() for neighbour in neighbours} == {alone}
    for answer in answers:
        assert answer.result().status_code == 200
        assert answer.result().json()["choices"][0]["text"] == '"a"'


class Breaking:
    """A detokenizer that breaks at once."""

    def push(self, ids):
        raise ValueError("broken on purpose")

    def finish(self):
        return ""


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_is_told_so_and_its_neighbours_go_on(client, server, monkeypatch, stream):
    alone = text(client, HONEST)
    usual = server.tokenizer.detokenizer
    # Only the doomed request shows special tokens.
    monkeypatch.setattr(server.tokenizer, "detokenizer", lambda skip: usual(skip) if skip else Breaking())
    doomed = {**HONEST, "skip_special_tokens": False, "stream": stream}
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(text, client, HONEST) for _ in range(3)]
        failed = pool.submit(client.post, "/v1/completions", json=doomed).result()
    assert {neighbour.result() for neighbour in neighbours} == {alone}
    assert "Other answers are not affected" in failed.text
    assert failed.status_code == (200 if stream else 500)


def test_requests_of_another_salt_share_no_cached_prompt():
    engine = tiny_engine()
    with Running(engine) as server, server.client() as client:

        def cached(**fields):
            before = engine.stats.cached_tokens
            client.post("/v1/completions", json={"prompt": "once upon a time there", "max_tokens": 2, **fields})
            server.wait_idle()
            return engine.stats.cached_tokens - before

        assert cached() == 0
        assert cached() > 0
        assert cached(cache_salt="a") == 0
        assert cached(cache_salt="a") > 0
        assert cached(cache_salt="b") == 0
        assert cached(cache_salt="") > 0
