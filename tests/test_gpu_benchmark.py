"""The GPU benchmark runs from end to end on tiny models, and one section's failure costs no other its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
TINY = ["--tiny", "--device", "cpu", "--kernels", "reference"]


def benchmark(out: Path, *arguments: str) -> tuple[int, dict]:
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *TINY, "--out", out, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text(encoding="utf-8"))


def test_every_section_gives_figures(tmp_path):
    code, found = benchmark(tmp_path / "gpu.json")
    assert code == 0, found["failures"]
    assert {row["section"] for row in found["rows"]} == {"decode", "eagle3", "kv_fp8", "fp8", "smollm"}
    by_batch = {row["batch"]: row for row in found["rows"] if row["section"] == "decode"}
    assert by_batch[3]["gbytes"] > by_batch[1]["gbytes"], "more requests have more keys to read"
    assert all(row["ms"] > 0 for row in found["rows"])
    drafted = [row for row in found["rows"] if row["what"].startswith("SmolLM2 EAGLE-3")]
    assert len(drafted) == 4
    assert all(f"{row['batch']} of {row['batch']} identical" in row["note"] for row in drafted)


def test_overlapping_kernels_share_out_the_time_that_passed(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gpu_profile import KernelShare, report, shares

    spans = [("a", 0.0, 10.0), ("b", 4.0, 13.0), ("a", 12.0, 22.0), ("b", 30.0, 31.0)]
    found = shares(spans, steps=2)
    assert found == [KernelShare("a", 1.0, 9.5), KernelShare("b", 1.0, 6.0)]
    assert sum(share.microseconds for share in found) == 31.0 / 2
    assert report(found, most=1).splitlines()[1].split() == ["6.0", "us", "1.0", "x", "all", "others"]


def test_a_section_that_fails_is_reported_and_the_others_go_on(tmp_path):
    code, found = benchmark(tmp_path / "gpu.json", "--vllm", str(tmp_path), "--only", "vllm,decode")
    assert code == 1
    assert [failure for failure in found["failures"] if failure.startswith("vllm")]
    assert {row["section"] for row in found["rows"]} == {"decode"}


@pytest.mark.embedded
def test_a_bundle_holds_the_embedded_model_and_its_draft(embedded_folder, tmp_path, monkeypatch):
    from slipstream.checkpoint.embedded import embedded_draft
    from slipstream.checkpoint.reader import open_checkpoint
    from slipstream.models.load import load_draft, load_target

    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "How much is 2 + 2?"}) + "\n", encoding="utf-8")
    bundle = tmp_path / "bundle.pt"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_bundle.py", "--questions", questions, "--out", bundle]
    subprocess.run(command, env=ENVIRONMENT, check=True)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gpu_models import read_bundle

    cpu = torch.device("cpu")
    read, target, draft = read_bundle(bundle, torch.bfloat16, cpu)
    expected = load_target(open_checkpoint(embedded_folder), torch.bfloat16, cpu)
    expected_draft = load_draft(open_checkpoint(embedded_draft()), expected, torch.bfloat16)
    for model, wanted in ((target, expected), (draft, expected_draft)):
        weights = dict(model.named_parameters())
        assert weights.keys() == dict(wanted.named_parameters()).keys()
        assert all(torch.equal(weights[name], weight) for name, weight in wanted.named_parameters())
    assert torch.equal(draft.token_ids_V, expected_draft.token_ids_V)
    assert len(read.prompts) == 1
    assert read.end_tokens
