"""Products whose warps are of two kinds compile for sm_90, and are for it alone; Triton's interpreter knows none."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from slipstream.kernels.triton.tuning import read_tuning

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
    assert len(compiled()) > 20
    for row in compiled():
        most = 192 if "128+128" in row["name"] else 64  # bytes of stack
        assert row["shared"] <= 227 << 10 and row["spills"] <= most, row
        assert row["matrix"] and not row["folded"], row


def test_only_weights_are_asked_for_before_the_inputs_are_there():
    for row in compiled():
        assert row["asked_before_inputs"] == row["weights"], row
        assert row["asked_after"] == row["rows"] + row["step"], row


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_no_other_gpu_is_given_what_only_hopper_has(architecture):
    tiles = read_tuning(architecture).wide_linear.values()
    assert tiles and not any(config.stream or config.tma or config.together for config in tiles)
