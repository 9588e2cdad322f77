"""What benchmarks/serve_host.py measures is the server: its engine without a model is served as any other."""

from benchmarks.serve_fake_engine import FakeEngine
from tiny_server import Running, tiny_tokenizer


def test_the_fake_engine_gives_all_that_was_asked_for():
    engine = FakeEngine(tiny_tokenizer(), num_together=2, period_s=0.001, tokens_per_step=3)
    with Running(engine) as server, server.client() as client:
        asked = {"prompt": "tell me", "max_tokens": 7, "n": 2, "logprobs": 2}
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 14
        assert all(choice["text"] for choice in answer["choices"])
        assert client.get("/metrics").status_code == 200
