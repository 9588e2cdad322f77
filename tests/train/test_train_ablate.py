"""scripts/train_ablate.py on a tiny target: every kind of variant in one call."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from training import RECIPE, write_target_folder

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_ablate.py"
VARIANTS = [
    "train.unroll=9", "draft.vocab_size=40", "train.hard_share=0.5", "draft.feedback=pre_norm", "train.lr=3e-3",
    "train.lr=1e-3,train.unroll=2", "train.rows_per_step=100000",
]  # fmt: skip


def command(folder):
    return [str(SCRIPT), str(folder / "target"), "--recipe", str(folder / "recipe.yaml"), "--data", str(folder),
            "--device", "cpu"]  # fmt: skip


def ablate(folder, *arguments):
    return subprocess.run(
        [sys.executable, *command(folder), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_one_call_trains_every_variant_and_leaves_a_table_and_json_lines(tmp_path):
    write_target_folder(tmp_path / "target")
    questions = [json.dumps({"question": f"How many is {i} and {i + 1}?"}) for i in range(48)]
    (tmp_path / "train.jsonl").write_text("\n".join(questions[:40]))
    (tmp_path / "test.jsonl").write_text("\n".join(questions[40:]))
    recipe = {**RECIPE, "data": {**RECIPE["data"], "answer_tokens": 1500}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "log.jsonl").write_text('{"variant": "of an earlier call"}\n')
    options = ["--work", tmp_path / "w", "--seconds", "0.3", "--log", tmp_path / "log.jsonl"]
    options += ["--offline", tmp_path / "features"]
    done = ablate(tmp_path, *options, *(word for variant in VARIANTS for word in ("--variant", variant)))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["of an earlier call", "as it is", *VARIANTS]
    _, *reached, failed = lines
    assert all(line["progress"]["acceptance"]["held-out K=3"] >= 1.0 for line in reached)
    assert [len(line["progress"]["accuracy"]) for line in reached] == [3, 9, 3, 3, 3, 3, 2]
    assert [line["recipe"]["train"]["lr"] for line in reached][-2:] == [3e-3, 1e-3]
    assert reached[2]["coverage"] < reached[0]["coverage"]
    assert "lower rows_per_step" in failed["error"]
    table = done.stdout[done.stdout.index("the same time each") :]
    assert all(variant in table for variant in VARIANTS)


def test_a_variant_that_is_none_or_changes_the_data_is_refused_at_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    for variant, why in (
        ("train.rate=1", "is not SECTION.KEY=VALUE"),
        ("data.magpie=1.0", "changes the data"),
        ("train.target_dtype=float16", "changes the data or the target"),
    ):
        monkeypatch.setattr("sys.argv", [*command(tmp_path), "--work", str(tmp_path / "w"), "--variant", variant])
        with pytest.raises(SystemExit) as ended:  # the program in this process: another would only load torch again
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert ended.value.code == 2 and why in capsys.readouterr().err
