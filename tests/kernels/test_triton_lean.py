"""Products of 1 to 4 rows in which one warp asks for weights compile for sm_90, and are for it alone."""

import pytest

pytest.importorskip("triton")

from triton_samples import compiled_by

from slipstream.kernels.triton.lean_products import plan_of
from slipstream.kernels.triton.tuning import LinearConfig, read_tuning


def test_lean_products_fit_twice_and_do_not_spill():
    rows = compiled_by("compile_lean.py")
    assert len(rows) > 10
    for row in rows:
        assert 2 * (row["shared"] + 1024) <= 228 << 10 and row["spills"] == 0, row
        assert row["matrix"] and row["waits"] == 2, row  # those who multiply, and the one who asks


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_no_other_gpu_is_given_what_only_hopper_has(architecture):
    assert not any(config.lean for config in read_tuning(architecture).linear_few.values())


def test_what_does_not_fit_is_left_to_other_kernels():
    config = LinearConfig(128, 256, 4, 4, 4, own_rows=32, side=True, lean=6, lean_box=32)
    plan = plan_of(config, 3, 1024, 1, "plain", "maxima", 1)
    assert plan is not None and (plan.mp, plan.bn, plan.steps) == (4, 16, 8)
    assert plan_of(config, 5, 1024, 1, "plain", "maxima", 1) is None
    assert plan_of(config, 2, 1280, 1, "plain", "norm", 1) is None
    assert plan_of(config, 1, 1000, 1, "plain", "maxima", 1) is None
