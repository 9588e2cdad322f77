"""The experts' kernels as they ship: each row of an architecture's table, compiled by the tests."""

from dataclasses import replace
from typing import Any

import triton.language as tl

from slipstream.kernels.triton.moe.gemv import words_down_kernel, words_gate_up_kernel
from slipstream.kernels.triton.moe.grouped_gemm import nibble_kernel, number_kernel
from slipstream.kernels.triton.moe.rows import (
    PAIRS_PER_STEP,
    SHARED_OUTPUTS,
    SHARED_TOKENS,
    activate_kernel,
    combine_kernel,
    rows_kernel,
)
from slipstream.kernels.triton.moe.scaled import scaled_kernel
from slipstream.kernels.triton.moe.tiles import ExpertTiles, StageTiles, shipped_tiles
from slipstream.kernels.triton.variants import Matrix, Variant

_NIBBLES = {
    "w4a8": ("w4a8", 0), "int4_per_channel": ("int4", 0), "int4_group": ("int4", 16), "int4_fp8": ("int4_fp8", 0),
    "mxfp4": ("mxfp4", 16), "mxfp4_act": ("mxfp4", 16),
}  # fmt: skip
_NUMBERS = {"dense": "dense", "fp8_per_channel": "fp8", "fp8_block": "fp8_block"}
_ROWS = {"w4a8": "*i8", "fp8_per_channel": "*fp8e4nv", "fp8_block": "*fp8e4nv"}
_ROW_SCALES = (*_ROWS, "int4_fp8")
_SCALES = {"mxfp4": "*u8", "mxfp4_act": "*u8", "int4_group": "*bf16"}
_TOP_K, _INTER, _HIDDEN = 8, 256, 7168  # of one of eight ranks of Kimi-K2.5


def variants(architecture: str) -> list[Variant]:
    """Return the kernels that run on an architecture, with bfloat16 activations."""
    found = []
    for name, rows in shipped_tiles(architecture).items():
        for limit, tiles in rows:
            if tiles.words:
                found += _words(f"experts {name} <= {limit} pairs", tiles)
                continue
            for stage, final in ((tiles.stage1, False), (tiles.stage2, True)):
                label = f"experts {name} <= {limit} pairs, stage {2 if final else 1}"
                found.append(_product(label, name, stage, tiles.block_t, final, architecture))
    if architecture == "gfx950":
        tiles = shipped_tiles(architecture)["mxfp4_act"][-1][1]
        found += [_scaled(tiles, final) for final in (False, True)] + _beside("mxfp4_packed")
    return [*found, *_beside(), *_beside("fp8_halves"), *_beside("mxfp4"), _sum()]


def _product(label: str, name: str, tiles: StageTiles, block_t: int, final: bool, architecture: str) -> Variant:
    row_type = _ROWS.get(name, "*bf16")
    sums = "*i32" if name == "w4a8" and not final else "*fp32"
    signature = {
        "x_ptr": row_type, "w_ptr": row_type if name in _NUMBERS else "*i8", "x_scale_ptr": "*fp32",
        "w_scale_ptr": _SCALES.get(name, "*fp32"), "tiles_ptr": "*i32", "pairs_ptr": "*i32", "out_ptr": sums,
        "max_tiles": "i32", "num_pairs": "i32", "N": "i32", "K" if name in _NUMBERS else "HALF": "i32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "ROWS_PER_INPUT": 1 if final else _TOP_K, "BLOCK_T": block_t, "BLOCK_N": tiles.block_n,
        "SPLITS": tiles.splits, "FINAL": final, "EVEN": True, "PDL": False,
    }  # fmt: skip
    absent = {"x_scale_ptr"} if name not in _ROW_SCALES else set()
    absent |= {"w_scale_ptr"} if name == "dense" else set()
    matrix: Matrix = "bf16"
    if name in _NUMBERS:
        kernel, constants = number_kernel, constants | {"FORMAT": _NUMBERS[name], "BLOCK_K": tiles.block_k}
        # gfx942 reads another E4M3 than checkpoints store, so Triton multiplies these as float16 there.
        if name.startswith("fp8"):
            matrix = "none" if architecture == "gfx942" else "fp8"
    else:
        kernel = nibble_kernel
        arithmetic, group = _NIBBLES[name]
        assembly = "cuda" if architecture.startswith("sm_") else "none"
        constants |= {"FORMAT": arithmetic, "GROUP_BYTES": group, "BLOCK_B": tiles.block_k // 2, "ASSEMBLY": assembly}
        if name == "w4a8":
            matrix = "int8"
        if name == "int4_fp8":
            signature["w_scale_2_ptr"] = "*fp32"
        else:
            absent.add("w_scale_2_ptr")
    divisible = tuple(
        argument
        for argument, kind in signature.items()
        if argument not in absent and (kind.startswith("*") or argument in ("N", "K", "HALF"))
    )
    variant = Variant(label, kernel, signature, constants, tiles.warps, tiles.stages, matrix, divisible)
    return _without(variant, absent)


def _scaled(tiles: ExpertTiles, final: bool) -> Variant:
    """Return a stage of MXFP4 rows and experts multiplied as they are stored."""
    stage = tiles.stage2 if final else tiles.stage1
    signature = dict.fromkeys(("x_ptr", "w_ptr", "x_scale_ptr", "w_scale_ptr"), "*u8")
    signature |= {"tiles_ptr": "*i32", "pairs_ptr": "*i32", "out_ptr": "*fp32"}
    signature |= dict.fromkeys(("max_tiles", "num_pairs", "N", "HALF"), "i32")
    constants = {
        "ROWS_PER_INPUT": 1 if final else _TOP_K, "BLOCK_T": tiles.block_t, "BLOCK_N": stage.block_n,
        "BLOCK_B": stage.block_k // 2, "SPLITS": stage.splits, "EVEN": True, "PDL": False,
    }  # fmt: skip
    divisible = tuple(name for name in signature if name not in ("max_tiles", "num_pairs"))
    name = f"experts mxfp4_act native, stage {2 if final else 1}"
    return Variant(name, scaled_kernel, signature, constants, stage.warps, stage.stages, "fp4", divisible)


def _words(label: str, tiles: ExpertTiles) -> list[Variant]:
    """Return the two stages of a few pairs, as Kimi's rank runs them on CUDA."""
    weight = {"w_ptr": "*i32", "w_scale_ptr": "*fp32", "ids_ptr": "*i64"}
    gate_up = weight | {"x_ptr": "*i32", "x_scale_ptr": "*fp32", "hidden_ptr": "*bf16", "INNER": "i32"}
    down = weight | {"weights_ptr": "*fp32", "D": "i32"}
    down |= dict.fromkeys(("hidden_ptr", "add_ptr", "inner_ptr", "shared_ptr", "out_ptr"), "*bf16")
    shared = {"TOP_K": _TOP_K, "ASSEMBLY": "cuda", "PDL": False}
    first, second = tiles.stage1, tiles.stage2
    first_block = {"WORDS": _HIDDEN // 8, "BLOCK_N": first.block_n, "BLOCK_W": min(first.block_k // 8, 1024)}
    second_block = {"WORDS": _INTER // 8, "BLOCK_N": second.block_n, "BLOCK_W": _INTER // 8, "SLOTS": 8}
    second_block |= {"ADD": True, "SHARED": _INTER, "BLOCK_T": SHARED_TOKENS}
    return [
        Variant(f"{label}, gate and up", words_gate_up_kernel, gate_up, shared | first_block, first.warps, 1,
                divisible=tuple(gate_up)),
        Variant(f"{label}, down", words_down_kernel, down, shared | second_block, second.warps, 1, "bf16",
                divisible=tuple(down)),
    ]  # fmt: skip


def _beside(input: str = "int8") -> list[Variant]:
    """Return the kernels that write rows and activated pairs as products read them, as Kimi's rank runs them."""
    codes = {"int8": "*i8", "mxfp4_packed": "*u8"}.get(input, "*bf16")
    scale = "*u8" if input == "mxfp4_packed" else "*fp32"
    rows = {
        "x_ptr": "*bf16", "codes_ptr": codes, "scale_ptr": scale, "ids_ptr": "*i32", "pairs_ptr": "*i32",
        "tiles_ptr": "*i32", "num_pairs": "i32", "max_tiles": "i32", "num_experts": "i32", "width": "i32",
    }  # fmt: skip
    rows_constants = {"INPUT": input, "BLOCK": 8192, "BINS": 512, "BLOCK_T": 16, "STEP": PAIRS_PER_STEP, "PDL": False}
    activate = {
        "sums_ptr": "*i32" if input == "int8" else "*fp32", "x_scale_ptr": scale, "w_scale_ptr": "*fp32",
        "w_scale_2_ptr": "*fp32", "bias_ptr": "*bf16", "ids_ptr": "*i32", "codes_ptr": codes, "scale_ptr": scale,
        "num_pairs": "i32", "width": "i32", "limit": "fp32", "alpha": "fp32",
    }  # fmt: skip
    activate_constants = {
        "TOP_K": _TOP_K, "SCALES": "none" if input.startswith("mxfp4") else "both", "SPLITS": 4, "INPUT": input,
        "CLAMPED": False, "TYPE": tl.bfloat16, "BLOCK": _INTER, "PDL": False,
    }  # fmt: skip
    absent = {"bias_ptr"} if input == "fp8_halves" else {"bias_ptr", "w_scale_2_ptr"}
    absent |= {"scale_ptr", "x_scale_ptr"} if input == "mxfp4" else set()
    name = "" if input == "int8" else f", {input}"
    return [
        _without(Variant(f"experts rows{name}", rows_kernel, rows, rows_constants, 4, 3,
                         divisible=("x_ptr", "codes_ptr", "width")), absent & {"scale_ptr"}),
        _without(Variant(f"experts activation{name}", activate_kernel, activate, activate_constants, 4, 3,
                         divisible=("sums_ptr", "width")), absent),
    ]  # fmt: skip


def _without(variant: Variant, absent: set[str]) -> Variant:
    """Return the variant with some of its tensors left out, which a launch gives as None."""
    signature = {argument: kind for argument, kind in variant.signature.items() if argument not in absent}
    return replace(variant, signature=signature, constants=variant.constants | dict.fromkeys(absent))


def _sum() -> Variant:
    """Return the kernel that adds up a token's experts, as Kimi's rank runs it."""
    signature = {
        "rows_ptr": "*fp32", "bias_ptr": "*bf16", "ids_ptr": "*i32", "weights_ptr": "*fp32", "add_ptr": "*bf16",
        "hidden_ptr": "*bf16", "shared_ptr": "*bf16", "out_ptr": "*bf16", "T": "i32", "D": "i32",
    }  # fmt: skip
    constants = {
        "TOP_K": _TOP_K, "ADD": True, "SHARED": _INTER, "BLOCK_T": SHARED_TOKENS, "BLOCK_N": SHARED_OUTPUTS,
        "PDL": False,
    }  # fmt: skip
    divisible = ("rows_ptr", "add_ptr", "hidden_ptr", "shared_ptr", "out_ptr", "D")
    return _without(Variant("experts sum", combine_kernel, signature, constants, 4, 3, "bf16", divisible), {"bias_ptr"})
