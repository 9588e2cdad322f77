"""The product whose warps are of two kinds compiles for sm_90; Triton's interpreter knows no such kernels."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("compile_streams.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_streamed_products_fit_hardly_spill_and_fold_nothing():
    assert len(compiled()) == 4
    for row in compiled():
        assert row["shared"] <= 227 << 10 and row["spills"] <= 96, row
        assert row["matrix"] and not row["folded"], row


def test_only_weights_are_asked_for_before_the_inputs_are_there():
    for row in compiled():
        assert row["asked_before_inputs"] == row["weights"], row
        assert row["asked_after"] == row["rows"] + row["step"], row
