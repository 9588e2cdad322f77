"""lm-eval itself, asked through our server protocol, gives the scores that we give."""

import json
import subprocess
from pathlib import Path

import pytest

from slipstream.bench.peers.environments import lm_eval_environment
from slipstream.records.store import read_record
from tests.bench.fake_server import Behaviour
from tests.bench.verbs import call, running

pytestmark = pytest.mark.interop
STORED = Path(__file__).parents[1] / "bench/data/gsm8k_answers.json"
SCRIPT = Path(__file__).parents[1] / "bench/make_gsm8k_answers.py"


def test_the_stored_scores_are_what_lm_eval_gives_today(tmp_path):
    before = STORED.read_text()
    try:
        subprocess.run([lm_eval_environment() / "python", SCRIPT], check=True, capture_output=True)
        assert json.loads(STORED.read_text()) == json.loads(before)
    finally:
        STORED.write_text(before)


@pytest.mark.parametrize("mode", ["--completions", "--chat"])
def test_lm_eval_and_slipstream_score_the_same_server_the_same(tmp_path, mode):
    stored = json.loads(STORED.read_text())
    for name in ("train", "test"):
        rows = stored[name][:40]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = [row["question"] for row in stored["test"][:40]]
    replies = {f"Question: {q}\nAnswer:": a for q, a in zip(questions, stored["answers"], strict=False)}
    records = []
    with running(Behaviour(reply=replies)) as (url,):
        for name, extra in (("ours", []), ("theirs", ["--lm-eval", lm_eval_environment() / "python"])):
            out = tmp_path / f"{name}.json"
            done = call(
                "eval", "gsm8k", "--url", url, "--data", tmp_path, "--shots", "2", mode, "--out", out, *extra
            )  # fmt: skip
            assert done.exit_code == 0, (done.output, done.exception)
            records.append(read_record(out))
    ours, theirs = records
    assert theirs.scorer == "lm-eval"
    assert len(ours.items) == 40
    assert [(i.strict, i.flexible) for i in ours.items] == [(i.strict, i.flexible) for i in theirs.items]
    assert 5 < sum(i.flexible for i in ours.items) < 40
