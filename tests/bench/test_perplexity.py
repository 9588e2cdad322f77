"""Texts are scored by what a server says of their tokens, and two servers' scores are compared text by text."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from slipstream.bench.client import ServerError
from slipstream.bench.evals.gsm8k import EvalError
from slipstream.bench.evals.perplexity import run_perplexity
from slipstream.records.store import read_record, write_record


def server(shift=0.0, values=lambda text: [-float(len(word)) for word in text.split()]):
    """A server to which a word is a token, less likely the longer it is."""

    async def post_json(path, body, timeout_s):
        assert path == "/v1/completions" and body["echo"] and body["max_tokens"] == 1
        scores = [value + shift for value in values(body["prompt"])]
        return {"choices": [{"logprobs": {"token_logprobs": [None, *scores[1:], -0.5]}}]}

    return SimpleNamespace(url="http://here", model="m", post_json=post_json)


def scored(*clients, texts=("a bb ccc", "a b b b c")):
    return asyncio.run(run_perplexity(clients, ("fp8", "auto"), texts, 2))


def test_perplexity_is_over_all_tokens_but_each_texts_first(tmp_path):
    record = scored(server(), None)
    assert [(item.num_tokens, item.logprob) for item in record.items] == [(2, -5.0), (4, -4.0)]
    assert record.perplexity() == pytest.approx(math.exp(9 / 6))
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json") == record


def test_a_change_from_the_baseline_comes_with_its_standard_error():
    mean, error = scored(server(shift=-0.25), server()).change()
    assert (mean, error) == (pytest.approx(-0.25), pytest.approx(0.0))
    mean, error = scored(server(values=lambda text: [-1.0 for _ in text.split()]), server()).change()
    assert mean == pytest.approx(3 / 6)
    assert error > 0


def test_servers_and_texts_that_cannot_be_scored_are_named():
    silent = server()

    async def post_json(path, body, timeout_s):
        return {"choices": [{"text": "", "logprobs": None}]}

    silent.post_json = post_json
    with pytest.raises(ServerError, match="http://here: sends no log probabilities of a prompt"):
        scored(silent, None)
    with pytest.raises(EvalError, match="None of the 2 texts has two tokens"):
        scored(server(), None, texts=("a", "b"))
    with pytest.raises(ServerError, match="text 0: has 2 tokens at one server and 3 at the other"):
        scored(server(), server(values=lambda text: [-1.0 for _ in f"{text} x".split()]))
