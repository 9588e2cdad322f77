"""Kernels compile for the GPUs they are for, on a machine that may have none, as passes of real models launch them.

`make test` compiles one launch of each kernel and architecture; `make kernels` everything that passes launch.
"""

import ast
import sys
from pathlib import Path

import pytest
from before_wait import touched_before_wait

pytest.importorskip("triton")

from triton_samples import compiled_by

from slipstream.kernels.triton import launch

SHARED_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10, "sm_90": 227 << 10}
PORTABLE = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
SPILLS = {  # bytes of stack on sm_90, vector registers on AMD's
    "sm_90": {"attention.prefill:windowed_kernel": 256, "gemm.wide_streams:stream_kernel": 240},
    "gfx942": {"gemm.wide_tiles:wide_kernel": 2},
}
FEW_SCALAR_SPILLS = 24
FEW_SPILLS = 88  # hardly any: Triton 3.7 spills 8 where 3.6 spills none
WEIGHTS = {"w_ptr", "w_scale_ptr", "weight_ptr", "norm_ptr"}
DESCRIPTION = {"starts_ptr", "lens_ptr", "pages_ptr", "index_ptr", "ancestors_ptr"}
PLACES = {"slots_ptr", "positions_ptr", "cos_ptr", "sin_ptr"}
TREES = {"pages_ptr", "root_ptr", "index_ptr", "paths_ptr"}
EARLY_READERS = {  # beside weights: what these read was written before the kernel before them began
    "attention.split_kv:splits_kernel": DESCRIPTION,
    "attention.even:even_kernel": DESCRIPTION,
    "attention.hopper_split_kv:hopper_split_kv_kernel": DESCRIPTION | {"k_ptr", "v_ptr"},
    "attention.persistent_ws:persistent_kernel": {"work_ptr"},
    "attention.tree:tree_splits_kernel": TREES | {"k_ptr", "v_ptr"},
    "attention.tree:tree_merge_kernel": {"root_ptr", "index_ptr"},
    "attention.hopper_tree:hopper_tree_kernel": TREES,
    "moe.gemv:words_down_kernel": {"ids_ptr"},
    "rope:_rope_kernel": PLACES,
}
HOPPER_ONLY = (
    "hopper_gemv_kernel", "stream_kernel", "hopper_split_kv_kernel", "hopper_tree_kernel", "persistent_kernel",
    "work_list_kernel",
)  # fmt: skip
LEVELS = ["each", pytest.param("all", marks=pytest.mark.compile)]


def compiled(architecture: str, level: str = "each") -> list[dict]:
    return compiled_by("compile_kernels.py", architecture, *(["--all"] if level == "all" else []))


def named(name: str, rows: list[dict], **constants) -> list[dict]:
    found = [row for row in rows if row["name"].endswith(f":{name}")]
    found = [row for row in found if all(row["constants"].get(key) == value for key, value in constants.items())]
    assert found, f"{name} {constants} is launched nowhere"
    return found


def table(rows: list[dict]) -> str:
    lines = [f"{'kernel':48} {'registers':>9} {'shared':>7} {'spills':>6} {'matrix':>6}"]
    for row in rows:
        spills = row["spills"] + row["scalar_spills"]
        lines.append(f"{row['name']:48} {row['registers'] or '-':>9} {row['shared']:>7} {spills:>6} {row['matrix']:>6}")
    return "\n".join(lines)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942", pytest.param("gfx950", marks=pytest.mark.compile)])
def test_every_kernel_links_fits_and_hardly_spills(architecture, level, capsys):
    rows = compiled(architecture, level)
    with capsys.disabled():
        sys.stdout.write(f"\n{architecture}\n{table(rows)}\n")
    assert len(rows) > 40
    for row in rows:
        most = SPILLS.get(architecture, {}).get(row["name"], FEW_SPILLS if architecture == "sm_90" else 0)
        assert row["bytes"] > 0, row
        assert row["shared"] <= SHARED_BYTES[architecture], row
        assert row["matrix_found"], f"no {row['matrix']} matrix instruction: {row}"
        assert row["spills"] <= most, row
        # Pointers and settings outnumber AMD's scalar registers; they spill to vector registers, not to memory.
        assert row["scalar_spills"] <= FEW_SCALAR_SPILLS or row["name"].startswith("sampling"), row


@pytest.mark.compile
@pytest.mark.parametrize("architecture", PORTABLE)
def test_portable_kernels_compile_and_fit_where_nothing_was_measured(architecture):
    for row in compiled(architecture):
        assert row["bytes"] > 0 and row["matrix_found"], row
        assert row["shared"] <= PORTABLE[architecture], row


@pytest.mark.parametrize("level", LEVELS)
def test_every_kernel_compiles_for_counts_of_one(level):
    # Triton makes an argument that is 1 a constant, which has no methods; its interpreter does not.
    refused = {row["name"]: row["refuses_one"] for row in compiled("sm_90", level) if row["refuses_one"]}
    assert not refused


@pytest.mark.parametrize("level", LEVELS)
def test_attention_and_products_fold_no_product_into_a_sum(level):
    # Blocks of keys with and without a mask would round differently, and which of them a row meets is its tile's doing.
    rows = [row for row in compiled("sm_90", level) if row["name"].startswith(("attention", "gemm"))]
    assert not [row for row in rows if row["folded"] and row["matrix"] == "bf16"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_that_overlaps_the_one_before_waits_for_it_before_touching_what_it_writes(level):
    overlapping = [row for row in compiled("sm_90", level) if row.get("overlap")]
    assert len(overlapping) > 40
    for row in overlapping:
        overlap, name = row["overlap"], row["name"]
        assert overlap["waits"] and not overlap["stores"], f"{name} never waits, or stores before"
        assert set(overlap["touches"]) <= WEIGHTS | EARLY_READERS.get(name, set()), row
        assert overlap["touches"] or not overlap["accesses"], f"the compiler moved memory accesses of {name} up"


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_whose_followers_read_early_wait_before_they_let_them_start(level):
    rows = compiled("sm_90", level)
    before = [
        *named("_rope_kernel", rows, WAITED=False), *named("_take_kernel", rows),
        *named("words_gate_up_kernel", rows), *named("stream_kernel", rows, WAITS_FIRST=True),
    ]  # fmt: skip
    assert all(row["overlap"]["starts_next_late"] for row in before), before


def test_a_rotation_behind_a_product_that_has_waited_lets_attention_start_at_once():
    for row in named("_rope_kernel", compiled("sm_90"), WAITED=True):
        assert set(row["overlap"]["touches"]) == PLACES and not row["overlap"]["starts_next_late"], row


def test_hopper_attention_reads_what_it_may_before_it_waits():
    rows = compiled("sm_90")
    for row in named("hopper_split_kv_kernel", rows):
        assert row["overlap"]["touches"] == sorted(EARLY_READERS[row["name"]]) and row["shared"] <= 40 << 10, row
    for row in named("persistent_kernel", rows):  # those that attend, the producer, and that again for others' results
        assert row["overlap"]["waits"] == 3 and not row["spills"], row


@pytest.mark.parametrize("level", LEVELS)
def test_a_hopper_gemv_has_a_processor_to_itself(level):
    for row in named("hopper_gemv_kernel", compiled("sm_90", level)):
        assert (114 << 10) < row["shared"] + 1024 <= (228 << 10) and row["spills"] <= 8, row  # none by Triton 3.6
        assert row["overlap"]["waits"] == 2, row  # consumers and producer


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_no_other_gpu_is_given_what_only_hopper_has(architecture):
    assert not [row for row in compiled(architecture) if row["name"].rpartition(":")[2] in HOPPER_ONLY]


def test_latent_attention_loads_a_block_while_another_is_multiplied():
    # Triton 3.6 gets such a loop wrong on sm_90 where it does not pipeline it; two blocks in shared memory are proof.
    assert all(row["shared"] > 2 * 64 * 576 * 2 for row in named("partial_kernel", compiled("sm_90")))


@pytest.mark.parametrize("level", LEVELS)
def test_copies_are_fenced_before_a_matrix_instruction_reads_what_they_wrote(level):
    # Hopper's instructions read shared memory by another way than cp.async writes it.
    unfenced = [row["name"] for row in compiled("sm_90", level) if row["unfenced"]]
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


def test_no_function_of_a_kernel_returns_none():
    # Triton 3.7 compiles `return None`; 3.6, which comes with torch 2.11, does not.
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in Path(launch.__file__).parent.rglob("*.py")}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [one for one in functions if any("jit" in ast.unparse(name) for name in one.decorator_list)]
    assert len(jitted) > 100
    for function in jitted:
        returned = [
            node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None
        ]
        assert "None" not in map(ast.unparse, returned), function.name
