"""Products whose warps are of two kinds compile for sm_90, and are for it alone; Triton's interpreter knows none."""

import pytest

pytest.importorskip("triton")

from triton_samples import compiled_by

from slipstream.kernels.triton.tuning import read_tuning


def test_streamed_products_fit_hardly_spill_and_fold_nothing():
    assert len(compiled_by("compile_streams.py")) > 20
    for row in compiled_by("compile_streams.py"):
        most = 192 if "128+128" in row["name"] else 112  # bytes of stack; by Triton 3.6 it is 96
        assert row["shared"] <= 227 << 10 and row["spills"] <= most, row
        assert row["matrix"] and not row["folded"], row


def test_only_weights_are_asked_for_before_the_inputs_are_there():
    for row in compiled_by("compile_streams.py"):
        assert row["asked_before_inputs"] == row["weights"], row
        assert row["asked_after"] == row["rows"] + row["step"], row


def test_a_product_that_settles_lets_the_next_kernel_start_when_its_inputs_are_there():
    rows = compiled_by("compile_streams.py")
    assert {row["settles"] for row in rows} == {False, True}
    for row in rows:
        assert row["starts"] == 1 and row["starts_next_late"] == row["settles"], row


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_no_other_gpu_is_given_what_only_hopper_has(architecture):
    tiles = read_tuning(architecture).wide_linear.values()
    assert tiles and not any(config.stream or config.tma or config.together for config in tiles)
