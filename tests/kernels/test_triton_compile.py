"""Every kernel that ships is compiled for the GPUs it is for, on a machine that may have none."""

import re
import sys

import pytest
from before_wait import touched_before_wait

pytest.importorskip("triton")

from triton_samples import compiled_by

SHARED_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10, "sm_90": 227 << 10}
SPILLS = {
    "sm_90": 64,  # bytes of stack: 8 in whole prompts' attention, 32 in latents, 64 in FP8 over 256 rows
    "gfx942": 2,  # registers, by Triton 3.7.1 in FP8 over 256 rows
}


def compiled(architecture: str) -> list[dict]:
    return compiled_by("compile_kernels.py", architecture)


def table(rows: list[dict]) -> str:
    lines = [f"{'kernel':48} {'registers':>9} {'shared':>7} {'spills':>6} {'matrix':>6}"]
    for row in rows:
        spills = row["spills"] + row["scalar_spills"]
        lines.append(f"{row['name']:48} {row['registers'] or '-':>9} {row['shared']:>7} {spills:>6} {row['matrix']:>6}")
    return "\n".join(lines)


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_every_kernel_links_fits_and_hardly_spills(architecture, capsys):
    rows = compiled(architecture)
    with capsys.disabled():
        sys.stdout.write(f"\n{architecture}\n{table(rows)}\n")
    assert len(rows) > 20
    for row in rows:
        assert row["bytes"] > 0, row
        assert row["shared"] <= SHARED_BYTES[architecture], row
        assert row["matrix_found"], f"no {row['matrix']} matrix instruction: {row}"
        assert row["spills"] <= SPILLS.get(architecture, 0), row
        # Pointers and settings outnumber AMD's scalar registers; they spill to vector registers, not to memory.
        assert not row["scalar_spills"] or row["name"].startswith("sample, "), row


def test_latent_attention_loads_a_block_while_another_is_multiplied():
    # Triton 3.6 gets such a loop wrong on sm_90 where it does not pipeline it; two blocks in shared memory are proof.
    rows = [row for row in compiled("sm_90") if re.fullmatch(r"latent attention, \d+ rows.*", row["name"])]
    assert rows
    assert all(row["shared"] > 2 * 64 * 576 * 2 for row in rows), rows


def test_every_kernel_compiles_for_counts_of_one():
    # Triton makes an argument that is 1 a constant, which has no methods; its interpreter does not.
    refused = {row["name"]: row["refuses_one"] for row in compiled("sm_90") if row["refuses_one"]}
    assert not refused


def test_attention_folds_no_product_into_a_sum():
    # Blocks of keys with and without a mask would round differently, and which of them a row meets is its tile's doing.
    rows = [row for row in compiled("sm_90") if row["name"].startswith("attention")]
    assert rows
    assert all(row["folded"] == 0 for row in rows), rows


WEIGHTS = {"w_ptr", "w_scale_ptr", "weight_ptr"}
DESCRIPTION = {"starts_ptr", "lens_ptr", "pages_ptr", "index_ptr", "ancestors_ptr"}
PLACES = {"slots_ptr", "positions_ptr", "cos_ptr", "sin_ptr"}
EARLY_READERS = {  # beside weights: what these read was written before the kernel before them began
    "attention 16 rows": DESCRIPTION,
    "attention 32 rows": DESCRIPTION,
    "experts w4a8 <= 32 pairs, down": {"ids_ptr"},
    "settled rope": PLACES,
}
BEFORE_EARLY_READERS = (
    "rope",
    "wide dense 160 rows 1x128, settles",
    "wide fp8 160 rows 1x128, settles",
    "narrow dense, rope",
    "narrow fp8, rope",
    "experts w4a8 <= 32 pairs, gate and up",
)


def overlapping() -> list[dict]:
    return [row for row in compiled("sm_90") if row["overlap"]]


def test_every_kernel_that_overlaps_the_one_before_waits_for_it_before_touching_what_it_writes():
    assert len(overlapping()) > 60
    for row in overlapping():
        overlap, name = row["overlap"], row["name"]
        early = next((what for start, what in EARLY_READERS.items() if name.startswith(start)), set())
        assert overlap["waits"], f"{name} never waits"
        assert set(overlap["touches"]) <= WEIGHTS | early, row
        assert overlap["touches"] or not overlap["accesses"], f"the compiler moved memory accesses of {name} up"


def test_kernels_whose_followers_read_early_wait_before_they_let_them_start():
    for start in BEFORE_EARLY_READERS:
        rows = [row for row in overlapping() if row["name"].startswith(start)]
        assert rows, f"{start} is gone; who runs before an early reader now?"
        assert all(row["overlap"]["starts_next_late"] for row in rows), rows


def test_a_rotation_behind_a_product_that_settles_lets_attention_start_at_once():
    rows = {row["name"]: row["overlap"] for row in overlapping() if row["name"].startswith("settled rope")}
    assert len(rows) == 2
    for name, overlap in rows.items():
        assert overlap["waits"] and set(overlap["touches"]) == PLACES and not overlap["starts_next_late"], name


def test_copies_are_fenced_before_a_matrix_instruction_reads_what_they_wrote():
    # Hopper's instructions read shared memory by another way than cp.async writes it.
    training = [row for row in compiled("sm_90") if row["name"].startswith("training")]
    assert training
    unfenced = [row["name"] for row in [*overlapping(), *training] if row["unfenced"]]
    assert not unfenced, unfenced


def test_a_read_above_the_wait_is_noticed():
    code = """
  tt.func public @kernel(%x_ptr: !tt.ptr<f32>, %w_ptr: !tt.ptr<f32>, %y_ptr: !tt.ptr<f32>) {
    %0 = tt.splat %w_ptr : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>>
    %1 = scf.for %i = %a to %b step %c iter_args(%at = %0) -> (tensor<32x!tt.ptr<f32>>) {
      %w = tt.load %at : tensor<32x!tt.ptr<f32>>
      %at_2 = tt.addptr %at, %step : tensor<32x!tt.ptr<f32>>
      scf.yield %at_2 : tensor<32x!tt.ptr<f32>>
    }
    READ
    %3 = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0"
    tt.store %y_ptr, %w : !tt.ptr<f32>
"""
    assert touched_before_wait(code.replace("READ", "")) == {"w_ptr"}
    assert touched_before_wait(code.replace("READ", "%x = tt.load %x_ptr : !tt.ptr<f32>")) == {"w_ptr", "x_ptr"}
    assert touched_before_wait(code.replace("griddepcontrol.wait", "nop")) is None
