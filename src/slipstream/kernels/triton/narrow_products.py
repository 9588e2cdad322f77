"""How products of a few rows are launched (`narrow`): what is folded into them, and what ships."""

import torch
import triton
from torch import Tensor

from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.linear import Epilogue, Launch, Rows, partial_sums, residual_stride
from slipstream.kernels.triton.narrow import narrow_kernel
from slipstream.kernels.triton.norm_rope import SQUARED, RopeWrite
from slipstream.kernels.triton.tuning import LinearConfig, read_tuning
from slipstream.kernels.triton.variants import Matrix, Variant

MOST_ROWS = 16
"""The token tile these products have; from 17 rows on those for many rows are faster."""
_LINE_BYTES = 128
_FP8_COLUMNS = 128  # after so many an FP8 sum is made whole


def squares_of(out_TN: Tensor) -> Tensor:
    """Return room for the sums of squares that a product leaves of outputs of this shape."""
    return torch.empty(len(out_TN), -(-out_TN.shape[1] // SQUARED), dtype=torch.float32, device=out_TN.device)


def rope_fits(write: RopeWrite, config: LinearConfig, dtype: torch.dtype) -> bool:
    """Tell whether tiles hold values along with those they are rotated with, and caches what rows are made of."""
    half, keys_SGd = write.rope.cos_Pr.shape[1], write.layer.keys_SGd
    same = keys_SGd.dtype == dtype and keys_SGd.stride() == write.layer.values_SGd.stride()
    return (
        same and keys_SGd.shape[2] == 2 * half and keys_SGd.stride(1) == 2 * half and half % (config.block_n // 2) == 0
    )


def multiply_narrow(
    rows: Rows, weight_NK: Tensor, w_scale_N: Tensor | None, kind: str, epilogue: Epilogue, launch: Launch
) -> Tensor:
    """Return at most MOST_ROWS rows times the weight, or the rotated queries where the epilogue writes keys."""
    x_TK, config = rows.values_TK, launch.config
    num_rows, num_outputs, num_inputs = x_TK.shape[0], *weight_NK.shape
    assert num_rows <= launch.block_m <= MOST_ROWS, "all rows are in one tile"
    twice = kind == "fp8" and config.block_k > _FP8_COLUMNS
    assert not twice or config.block_k == 2 * _FP8_COLUMNS, "FP8 sums are made whole after 128 columns, or twice 128"
    _, num_tiles, splits = grid = launch.grid(num_rows, num_outputs, epilogue.silu)
    y = torch.empty(num_rows, _num_stored(epilogue, num_outputs), dtype=rows.dtype, device=x_TK.device)
    parts = triton.next_power_of_2(-(-num_inputs // SQUARED))
    staged = (config.num_stages - 1) * config.block_k
    narrow_kernel[(num_tiles, splits)](
        x_TK, weight_NK, y if rows.scale_T is None else rows.scale_T, y if w_scale_N is None else w_scale_N,
        y if epilogue.bias_N is None else epilogue.bias_N,
        y if epilogue.residual_TN is None else epilogue.residual_TN,
        y, partial_sums(launch, grid, y, kind == "int8"), launch.counters,
        *((y, y) if rows.norm is None else (rows.norm.weight_D, rows.norm.squares_TB)),
        y if epilogue.squares_TB is None else epilogue.squares_TB, *_places(epilogue, y),
        num_rows, num_outputs, num_inputs, launch.stretch // config.block_k, x_TK.stride(0),
        residual_stride(epilogue), y.stride(0),
        0 if epilogue.rope is None else epilogue.rope.layer.keys_SGd.stride(0),
        0.0 if rows.norm is None else rows.norm.eps,
        BLOCK_M=launch.block_m, BLOCK_N=config.block_n, BLOCK_K=_FP8_COLUMNS if twice else config.block_k,
        TWICE=twice, SPLITS=splits, EVEN_K=num_inputs == launch.stretch * splits, KIND=kind,
        END="rope" if epilogue.rope is not None else "silu" if epilogue.silu else "plain",
        HAS_BIAS=epilogue.bias_N is not None, HAS_RESIDUAL=epilogue.residual_TN is not None,
        NORM=rows.norm is not None, PARTS=parts, LEVELS=parts.bit_length() - 1,
        HAS_SQUARES=epilogue.squares_TB is not None, **_heads(epilogue.rope),
        AHEAD=_lines_ahead(config, launch.stretch - staged, weight_NK.element_size()), STAGED=staged,
        PDL=launch.dependent, num_warps=config.num_warps, num_stages=config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    )  # fmt: skip
    return y


def _num_stored(epilogue: Epilogue, num_outputs: int) -> int:
    if epilogue.rope is not None:
        return epilogue.rope.heads[0] * epilogue.rope.layer.keys_SGd.shape[2]
    return num_outputs // 2 if epilogue.silu else num_outputs


def _places(epilogue: Epilogue, y: Tensor) -> tuple[Tensor, ...]:
    """Return the caches and the tables of a rotation; absent ones are stood in for by one that is not read."""
    if epilogue.rope is None:
        return (y,) * 6
    rope, layer = epilogue.rope.rope, epilogue.rope.layer
    return layer.keys_SGd, layer.values_SGd, rope.slots_T, rope.positions_T, rope.cos_Pr, rope.sin_Pr


def _heads(write: RopeWrite | None) -> dict[str, int]:
    if write is None:
        return {"HEADS": 0, "GROUPS": 0, "HALF": 1}
    return {"HEADS": write.heads[0], "GROUPS": write.heads[1], "HALF": write.rope.cos_Pr.shape[1]}


def _lines_ahead(config: LinearConfig, columns_left: int, itemsize: int) -> int:
    """Return how many lines of a row to ask for: a power of two, within the stretch."""
    most = max(columns_left * itemsize // _LINE_BYTES, 0)
    return min(config.ahead, 1 << (most.bit_length() - 1)) if most else 0


_POINTERS = {"dense": "*bf16", "fp8": "*fp8e4nv"}
_MATRIX: dict[str, Matrix] = {"dense": "bf16", "fp8": "fp8"}


def variants(architecture: str) -> list[Variant]:
    """List what ships where weights go first: products that end in each way, with and without a norm before them."""
    tuning = read_tuning(architecture)
    if not tuning.weights_first:
        return []
    shipped = []
    for kind, shape, end, norm, squares in (
        ("dense", (6144, 4096), "rope", True, False),
        ("dense", (4096, 4096), "plain", False, True),
        ("dense", (28672, 4096), "silu", True, False),
        ("dense", (4096, 14336), "plain", False, True),
        ("fp8", (6144, 4096), "rope", False, False),
        ("fp8", (28672, 4096), "silu", False, False),
        ("fp8", (4096, 14336), "plain", False, False),
    ):
        config = tuning.linear_config(kind, *shape, 2 if kind == "dense" else 1)
        name = f"narrow {kind}, {end}{', norm' if norm else ''}, {shape[0]} x {shape[1]}"
        fitted = tuning.fitted(config, MOST_ROWS, 2 if kind == "dense" else 1, staged_rows=False)
        shipped.append(_variant(name, kind, fitted, MOST_ROWS, (end, norm, squares)))
    return shipped


def _variant(name: str, kind: str, config: LinearConfig, block_m: int, folds: tuple[str, bool, bool]) -> Variant:
    code, (end, norm, squares) = _POINTERS[kind], folds
    pointers = {
        "x_ptr": code, "w_ptr": code, "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16",
        "residual_ptr": "*bf16", "y_ptr": "*bf16", "partial_ptr": "*fp32", "counter_ptr": "*i32", "norm_ptr": "*bf16",
        "squares_ptr": "*fp32", "squares_out_ptr": "*fp32", "keys_ptr": "*bf16", "values_ptr": "*bf16",
        "slots_ptr": "*i64", "positions_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
    }  # fmt: skip
    strides = ("N", "K", "x_stride", "residual_stride", "y_stride", "slot_stride")
    signature = {**pointers, "M": "i32", "steps": "i32", **dict.fromkeys(strides, "i32"), "eps": "fp32"}
    twice = kind == "fp8" and config.block_k > _FP8_COLUMNS
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": _FP8_COLUMNS if twice else config.block_k,
        "TWICE": twice, "SPLITS": config.split_k, "EVEN_K": True, "KIND": kind, "END": end, "HAS_BIAS": False,
        "HAS_RESIDUAL": squares, "NORM": norm, "PARTS": 64, "LEVELS": 6, "HAS_SQUARES": squares, "HEADS": 32,
        "GROUPS": 8, "HALF": 64, "AHEAD": config.ahead, "STAGED": (config.num_stages - 1) * config.block_k,
        "PDL": False,
    }  # fmt: skip
    divisible = (*pointers, *strides)
    return Variant(
        name, narrow_kernel, signature, constants, config.num_warps, config.num_stages, _MATRIX[kind], divisible
    )
