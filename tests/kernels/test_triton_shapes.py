"""Any shape fits: products of real models' weights, by any number of rows, stay within each GPU's shared memory."""

import pytest

pytest.importorskip("triton")

from triton_samples import compiled_by

SHARED_BYTES = {
    "sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10,
    "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip
HOPPER_ONLY = {"hopper_gemv_kernel", "stream_kernel", "hopper_ws_kernel", "small_m_kernel"}


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_products_of_real_shapes_fit_shared_memory(architecture):
    rows = [row for row in compiled_by("shared_memory.py", *SHARED_BYTES) if row["architecture"] == architecture]
    assert len(rows) == 8 * 5 * (4 if architecture == "sm_80" else 5) * 10
    counted = [row for row in rows if row["bytes"] is not None]
    assert len(counted) > 700
    assert not [row for row in counted if row["bytes"] > SHARED_BYTES[architecture]]


def test_an_architecture_without_a_file_runs_portable_kernels_alone():
    rows = [row for row in compiled_by("shared_memory.py", *SHARED_BYTES) if row["architecture"] not in ("sm_90",)]
    assert not {row["kernel"] for row in rows} & HOPPER_ONLY
