"""Training's kernels as a target and a draft of SmolLM2's shape launch them, so that a test can compile them all."""

from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.kernels.training import triton_attention, triton_attention_grad, triton_loss, triton_pointwise

Matrix = Literal["none", "bf16"]
_HEADS = {"H": 9, "G": 3, "D": 64}
_STATES = ("q", "k", "v", "own_k", "own_v", "out", "grad", "grad_q", "grad_k", "grad_v", "x", "weight")
_NUMBERS = ("lse", "drop", "logits", "taught", "log_total", "inside", "loss", "agreed", "full", "cos", "sin", "parts")
_TYPES = {
    **{f"{name}_ptr": "*bf16" for name in _STATES},
    **{f"{name}_ptr": "*fp32" for name in _NUMBERS},
    **{f"{name}_ptr": "*i32" for name in ("first", "end")},
    **{f"{name}_ptr": "*i64" for name in ("best", "at", "token_ids")},
    **dict.fromkeys(("scale", "log2_scale", "hard_share", "sign", "eps"), "fp32"),
}


@dataclass(frozen=True)
class Variant:
    """One kernel with one set of compile-time values.

    Args:
        kernel: the triton.jit function; triton has no types of its own.
        signature: Triton's type of each run-time argument ("*bf16", "i32", "fp32", ...).
        constants: the tl.constexpr arguments.
        matrix: which matrix instructions the code must contain.
        divisible: run-time arguments known to be multiples of 16 (strides, widths and aligned pointers).
        registers: the most a thread may have; 0: as many as the compiler likes.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    matrix: Matrix = "none"
    divisible: tuple[str, ...] = field(default=())
    registers: int = 0


def variants(architecture: str) -> list[Variant]:
    """List what training launches; attention for NVIDIA's GPUs alone, for on AMD's it spills registers."""
    fence = {"FENCE": True}
    block = {**_HEADS, "BLOCK": triton_attention_grad.BLOCK}
    own = {**_HEADS, "BLOCK": triton_attention_grad.OWN_BLOCK}
    loss = {"weight_ptr": "*fp32", "out_ptr": "*fp32"}
    tile, rows = {"ROWS": 4, "COLUMNS": 512}, {"ROWS": 2, "BLOCK": 1024}
    turn = {"H": 9, "D": 64, "HALF": 32, "ROWS": 64, "LANES": 32, "REST": 0}
    pointwise = triton_pointwise
    attention = [
        _variant("attention", triton_attention._forward_kernel, {**block, **fence}, matrix="bf16"),
        _variant("attention by queries", triton_attention_grad._queries_kernel, {**block, **fence}, matrix="bf16"),
        _variant("attention by keys", triton_attention_grad._keys_kernel, {**block, **fence}, matrix="bf16"),
        _variant("attention by own keys", triton_attention_grad._own_kernel, own),
    ]
    return [
        *(attention if architecture.startswith("sm_") else []),
        _variant("loss", triton_loss._compare_kernel, {"BLOCK": 4096}, {**loss, "grad_ptr": "*bf16"}, warps=8),
        _variant("teacher", triton_loss._read_kernel, {"BLOCK": 4096}, loss, warps=8),
        _variant("silu_mul", pointwise._silu_mul_kernel, tile),
        _variant("silu_mul by both", pointwise._silu_mul_grad_kernel, tile),
        _variant("rotate", pointwise._rotate_kernel, turn),
        _variant("norm", pointwise._norm_kernel, rows),
        _variant("norm by both", pointwise._norm_grad_kernel, {**rows, "BY_ROWS": True}),
    ]


def _variant(
    name: str, kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None, warps: int = 4,
    matrix: Any = "none",
) -> Variant:  # fmt: skip
    known = {**_TYPES, **(types or {})}
    given = {arg: known.get(arg, "i32") for arg in kernel.arg_names if arg not in constants}
    divisible = tuple(arg for arg, kind in given.items() if kind != "fp32" and arg not in ("num_own", "N"))
    return Variant(f"training: {name}", kernel, given, constants, warps, 2, matrix, divisible)
