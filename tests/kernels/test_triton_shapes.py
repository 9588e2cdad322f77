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


@pytest.mark.parametrize("format", ["dense", "fp8_per_channel"])
def test_hopper_streams_weights_that_no_configuration_names(format):
    rows = [row for row in compiled_by("shared_memory.py", *SHARED_BYTES) if row["architecture"] == "sm_90"]
    kernels = {tuple(row["shape"]): row["kernel"] for row in rows if row["format"] == format}
    gates_and_head = [(19456, 2560), (151936, 2560), (27648, 5120), (152064, 5120)]
    for shape in gates_and_head:
        assert {kernels[many, *shape] for many in (17, 40, 64, 160)} == {"stream_kernel"}
    assert kernels[40, 3072, 576] != "stream_kernel", "nine steps are no work for a ring"


def test_an_architecture_without_a_file_runs_portable_kernels_alone():
    rows = [row for row in compiled_by("shared_memory.py", *SHARED_BYTES) if row["architecture"] not in ("sm_90",)]
    assert not {row["kernel"] for row in rows} & HOPPER_ONLY
