"""`serve --learn`: answers are kept as ids, better drafts take over between steps, worse ones are returned from."""

import logging
import threading

import pytest
from tiny_server import Running, tiny_engine
from typer.testing import CliRunner

from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.cli.main import app
from slipstream.errors import DataError, SlipstreamError
from slipstream.records import traffic
from slipstream.records.traffic import Deployed, part_paths, read_part, read_returned, write_deployed
from slipstream.serve.config import LearnConfig
from slipstream.train.run.output import add_draft
from tiny import tiny_draft

ASKED = {"prompt": "abc def", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def learning_of(server):
    return server.app.state.service.metrics.learning


def write_drafts(folder, engine, count):
    """Write drafts into a folder of learning, every second one of them random."""
    own = engine.drafter.draft
    (folder / "drafts").mkdir(parents=True)
    for number in range(count):
        like = tiny_draft(
            engine.executor.runner.model, number, captured_layers=(4, 4, 4), vocab_size=own.spec.vocab_size,
            draft_vocab_size=own.spec.vocab_size,
        )  # fmt: skip
        with CheckpointWriter(folder / "drafts" / str(number)) as writer:
            add_draft(writer, like if number % 2 else own, "sglang", "tiny")


def deploy(folder, number, draft):
    write_deployed(folder, Deployed(number, f"drafts/{draft}", 1.0, 1.5))


def test_answers_are_kept_as_ids_but_not_those_of_tenants_or_grammars_and_no_log_shows_them(tmp_path, caplog):
    running = Running(tiny_engine(), learn=LearnConfig(tmp_path))
    with caplog.at_level(logging.DEBUG), running as server, server.client() as client:
        answer = client.post("/v1/completions", json={**ASKED, "return_token_ids": True}).json()["choices"][0]
        client.post("/v1/completions", json={**ASKED, "cache_salt": "tenant"})
        client.post("/v1/completions", json={**ASKED, "max_tokens": 3})
        client.post("/v1/completions", json={**ASKED, "structured_outputs": {"regex": "[a-c]{20}"}})
        learning_of(server).look()
        text = client.get("/metrics").text
    (kept,) = [one for path in part_paths(tmp_path) for one in read_part(path)]
    assert list(kept.answer) == answer["token_ids"] and list(kept.prompt) == answer["prompt_token_ids"]
    assert "slipstream_learning_deployed_total 0.0" in text
    assert "abc def" not in caplog.text and answer["text"] not in caplog.text


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.long)])
def test_drafts_take_over_one_after_the_other_under_64_streams_and_no_token_changes(tmp_path, count):
    engine = tiny_engine(max_requests=64)
    write_drafts(tmp_path, engine, 5)
    asked = {**ASKED, "prompt": [f"{chr(97 + i % 26)} {i}" for i in range(64)]}
    with Running(engine, learn=LearnConfig(tmp_path)) as server, server.client() as client:

        def answers() -> list[str]:
            return [choice["text"] for choice in client.post("/v1/completions", json=asked).json()["choices"]]

        plain, found, over = answers(), [], threading.Event()

        def stream() -> None:
            while not over.is_set():
                found.append(answers())

        streams = threading.Thread(target=stream)
        streams.start()
        for number in range(1, count + 1):
            deploy(tmp_path, number, number % 5)
            learning_of(server).look()
        over.set()
        streams.join()
        assert found and all(one == plain for one in found)
        assert learning_of(server).deployed == count
        assert len(client.get("/admin/draft").json()["served"]) == 6  # the five, and the one it was started with


def test_a_draft_that_is_worse_in_use_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.serve.learning._JUDGED_TOKENS", 60)
    engine = tiny_engine()
    write_drafts(tmp_path, engine, 2)
    with Running(engine, learn=LearnConfig(tmp_path)) as server, server.client() as client:
        for _ in range(3):
            client.post("/v1/completions", json={**ASKED, "max_tokens": 48})
        deploy(tmp_path, 1, 1)
        learning_of(server).look()
        for _ in range(3):
            client.post("/v1/completions", json={**ASKED, "max_tokens": 48})
        learning_of(server).look()
        assert client.get("/admin/draft").json()["draft"] == "as started"
        assert "slipstream_learning_returned_total 1.0" in client.get("/metrics").text
        learning_of(server).look()
        assert client.get("/admin/draft").json()["draft"] == "as started"  # it is not tried again
    assert read_returned(tmp_path).number == 1


def test_a_draft_that_is_missing_torn_or_damaged_never_takes_over_and_serving_goes_on(tmp_path):
    engine = tiny_engine()
    write_drafts(tmp_path, engine, 2)
    (torn,) = (tmp_path / "drafts" / "0").glob("*.safetensors")
    torn.write_bytes(torn.read_bytes()[:-64])
    (damaged,) = (tmp_path / "drafts" / "1").glob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-64] + b"\xff" * 64)  # NaN
    with Running(engine, learn=LearnConfig(tmp_path)) as server, server.client() as client:
        for number, draft in enumerate(("nowhere", "0", "1"), start=1):
            deploy(tmp_path, number, draft)
            with pytest.raises(SlipstreamError, match=f"drafts/{draft}"):
                learning_of(server).look()
            assert client.post("/v1/completions", json=ASKED).status_code == 200
        assert client.get("/admin/draft").json()["draft"] == "as started"


def test_a_full_disk_is_logged_nothing_piles_up_and_serving_goes_on(tmp_path, caplog, monkeypatch):
    def full(path, text):
        raise DataError(f"{path}: could not be written (No space left on device).")

    monkeypatch.setattr(traffic, "write_whole", full)
    monkeypatch.setattr(traffic, "_PART_TOKENS", 1)
    monkeypatch.setattr("slipstream.serve.learning._LOOK_S", 600)  # this test looks by itself
    with Running(tiny_engine(), learn=LearnConfig(tmp_path)) as server, server.client() as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        with pytest.raises(DataError, match="No space left"):
            learning_of(server).look()
        learning_of(server).look()  # nothing of it is left to be written
        client.post("/v1/completions", json=ASKED)
    assert "learning: " in caplog.text and "No space left" in caplog.text  # at the end, what was left


def test_learning_without_a_draft_to_adapt_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["serve", "--learn", str(tmp_path), "--draft", "ngram"])
    assert "adapts an EAGLE-3 draft" in str(result.exception)
