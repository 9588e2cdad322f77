"""The verbs work from the command line: plan, validate, run, eval and report."""

import json
import lzma
import sys
from pathlib import Path

import pytest

from slipstream.bench.client import ServerError
from slipstream.bench.evals.gsm8k import EvalError
from slipstream.bench.recipe_file import RecipeError
from slipstream.records.store import read_record
from tests.bench.fake_server import DRAFTING, FAKE, FAST, Behaviour
from tests.bench.inferencex_entry import KEY, MASTER
from tests.bench.verbs import call, running
from tests.ports import free_port

RECIPES = Path(__file__).parents[2] / "recipes" / "bench"


@pytest.fixture
def recipe(tmp_path):
    for name, behaviour in (("plain", FAST), ("spec", DRAFTING)):
        (tmp_path / f"{name}.json").write_text(json.dumps(behaviour))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    content = {
        "name": "small",
        "about": "test",
        "machine": {"name": "here", "gpus": 0},
        "target": {"id": "fake", "context": 4096},
        "servers": {"slipstream": {"port": free_port(num=2), "program": [sys.executable, str(FAKE), "serve"]}},
        "baseline": "plain",
        "arms": {
            "plain": {"flags": {"behaviour": str(tmp_path / "plain.json")}},
            "spec": {
                "speculation": {"method": "ngram", "num_steps": 2},
                "flags": {"behaviour": str(tmp_path / "spec.json")},
            },
        },
        "workloads": {"chat": {"kind": "prompts", "path": "prompts.jsonl", "output_tokens": 8}},
        "concurrency": [1, 2],
        "seeds": [1, 2],
        "traffic": {"requests_per_stream": 3, "warmups_per_stream": 1},
        "schedule": {"servers": "together"},
    }
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(content))
    return path


def test_a_recipe_runs_and_its_report_can_be_read(recipe, tmp_path):
    done = call("bench", "run", recipe, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "8 points measured, 0 of them invalid; 0 were already there." in done.output
    assert "━" not in done.output, "bars are for terminals"
    again = call("bench", "run", recipe, "--out", tmp_path / "out")
    assert "0 points measured, 0 of them invalid; 8 were already there." in again.output
    made = call("report", tmp_path / "out", "--out", tmp_path / "page")
    assert made.exit_code == 0, made.output
    assert "spec against plain, chat on tp1" in made.output
    assert (tmp_path / "page/report.html").stat().st_size > 10_000


def test_plan_prints_commands_for_a_person_and_for_a_program(recipe):
    text = call("bench", "plan", recipe)
    assert "--draft none" in text.output
    assert "--draft ngram" in text.output
    rows = json.loads(call("bench", "plan", recipe, "--format", "json").output)
    assert len(rows) == 8
    assert rows[0]["argv"][:3] == [sys.executable, str(FAKE), "serve"]


def test_validate_names_the_broken_recipe_and_fails(recipe, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text(recipe.read_text().replace('"concurrency"', '"concurency"'))
    done = call("bench", "validate", recipe, broken, RECIPES / "minimax-m2.5-vllm.yaml")
    assert done.exit_code == 1
    assert "small.yaml: valid, 8 points" in done.output
    assert "Did you mean 'concurrency'?" in done.output


def test_a_url_measures_the_server_that_runs(recipe, tmp_path):
    with running(Behaviour(ttft_s=0.001, step_s=0.0002)) as (url,):
        done = call("bench", "run", recipe, "--out", tmp_path / "out", "--url", url, "--arm", "plain")
    assert done.exit_code == 0, done.output
    assert "4 points measured" in done.output
    gone = call("bench", "run", recipe, "--out", tmp_path / "gone", "--url", url, "--arm", "plain")
    assert isinstance(gone.exception, ServerError)
    assert not (tmp_path / "gone").exists()
    refused = call("bench", "run", recipe, "--out", tmp_path / "out", "--url", url)
    assert isinstance(refused.exception, RecipeError)


def test_gsm8k_scores_a_server_and_pairs_it_with_another(tmp_path):
    rows = [{"question": f"Q{i}?", "answer": f"work\n#### {i}"} for i in range(6)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl.xz").write_bytes(lzma.compress(text))
    right = {f"Question: Q{i}?\nAnswer:": f"so\n#### {i}" for i in range(6)}
    wrong = right | {"Question: Q4?\nAnswer:": "#### 9"}
    with running(Behaviour(reply=right), Behaviour(reply=wrong)) as (one, other):
        common = ["--data", tmp_path, "--shots", "0", "--limit", "6"]
        first = call("eval", "gsm8k", "--url", one, "--arm", "plain", "--out", tmp_path / "a.json", *common)
        second = call(
            "eval", "gsm8k", "--url", other, "--arm", "spec", "--out", tmp_path / "b.json",
            "--baseline", tmp_path / "a.json", *common,
        )  # fmt: skip
    assert "flexible-extract 1.0000" in first.output
    assert "strict-match     0.8333" in second.output
    assert "against plain, strict: 0 became right, 1 wrong of 6" in second.output


def test_a_sweep_asks_gsm8k_on_the_servers_it_measured(recipe, tmp_path):
    rows = "".join(json.dumps({"question": f"Q{i}?", "answer": f"#### {i}"}) + "\n" for i in range(4))
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    asked = ["--set", "evals.gsm8k={num_shots: 1, limit: 3}", "--set", "concurrency=[1]"]
    without = call("bench", "run", recipe, "--out", tmp_path / "out", *asked)
    assert "give its folder with --gsm8k" in without.output
    done = call("bench", "run", recipe, "--out", tmp_path / "out", "--gsm8k", tmp_path, *asked)
    assert done.exit_code == 0, done.output
    assert "0 points measured" in done.output
    names = sorted(path.name for path in (tmp_path / "out/evals").iterdir())
    assert names == ["gsm8k.tp1.plain.json", "gsm8k.tp1.spec.json"]
    first = read_record(tmp_path / "out/evals" / names[0])
    assert len(first.items) == 3
    call("bench", "run", recipe, "--out", tmp_path / "out", "--gsm8k", tmp_path, *asked)
    assert read_record(tmp_path / "out/evals" / names[0]) == first, "nothing has changed"
    fewer = [*asked, "--set", "evals.gsm8k.limit=2", "--arm", "plain"]
    call("bench", "run", recipe, "--out", tmp_path / "out", "--gsm8k", tmp_path, *fewer)
    assert len(read_record(tmp_path / "out/evals" / names[0]).items) == 2
    assert read_record(tmp_path / "out/superseded/gsm8k.tp1.plain.1.json") == first


def test_questions_that_are_not_there_are_missed_before_anything_is_started(recipe, tmp_path):
    asked = ["--set", "evals.gsm8k={num_shots: 1}", "--gsm8k", tmp_path / "gsmk8"]
    result = call("bench", "run", recipe, "--out", tmp_path / "out", *asked)
    assert isinstance(result.exception, EvalError)
    assert not (tmp_path / "out").exists()


def test_lossless_fails_when_one_token_differs(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    same = {"first": "a b c", "second": "d e f"}
    with running(Behaviour(reply=same), Behaviour(reply=same), Behaviour(reply=same | {"second": "d X f"})) as urls:
        common = ["--prompts", prompts, "--baseline-url", urls[0], "--out", tmp_path / "l.json"]
        good = call("eval", "lossless", "--url", urls[1], *common)
        bad = call("eval", "lossless", "--url", urls[2], *common)
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert "6 of 6 outputs are identical" in good.output
    assert "token 1 is 'X' instead of 'e' (top-two margin 0.2500)" in bad.output


def test_an_inferencex_entry_is_imported(tmp_path):
    (tmp_path / "master.yaml").write_text(MASTER)
    assert KEY in call("bench", "import", tmp_path / "master.yaml").output
    done = call(
        "bench", "import", tmp_path / "master.yaml", "--key", KEY, "--out", tmp_path,
        "--draft", "amd/kimi-k2.5-eagle3-fp8", "--num-steps", "6", "--token-range", "0:163584",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert call("bench", "validate", done.output.strip()).exit_code == 0
    every = call("bench", "import", tmp_path / "master.yaml", "--all", "--out", tmp_path)
    assert "0 entries imported whole, 0 in part (rows above), 1 refused" in every.output
