"""A layer of experts in four launches: rows, gate and up, activation, down; then each token's weighted sum.

Specified by `slipstream.kernels.reference.experts`. No launch waits for the host and grids depend on shapes alone, so
the whole is captured in a CUDA graph. A token's bits do not depend on the other tokens: integer sums are exact,
float sums are cut in one way only, and a token's experts are added in the order of k without atomics.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.checkpoint.spec import SILU, Activation
from slipstream.errors import KernelError
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.moe import gemv
from slipstream.kernels.triton.moe.gemv import run_words
from slipstream.kernels.triton.moe.grouped_gemm import nibble_kernel, number_kernel
from slipstream.kernels.triton.moe.rows import (
    PAIRS_PER_STEP,
    SHARED_OUTPUTS,
    SHARED_TOKENS,
    activate_kernel,
    combine_kernel,
    quantize_kernel,
    rows_kernel,
)
from slipstream.kernels.triton.moe.tiles import ExpertTiles, StageTiles, expert_tiles
from slipstream.kernels.triton.tuning import architecture_of, has_fp8, matrix_instruction
from slipstream.quant.packed import ExpertWeights


@dataclass(frozen=True)
class _Arithmetic:
    """How a format's products are made.

    Args:
        name: the arithmetic of the product kernel; nibbles hold two codes a byte.
        input: how rows are written (see `write_row`), in `input_dtype` or x's own.
        scales: which scales are applied to a whole sum: none, the weight's, or the weight's and the row's.
    """

    name: str
    nibbles: bool
    input: str
    input_dtype: torch.dtype | None
    scales: str


_FORMATS = {
    "dense": _Arithmetic("dense", False, "plain", None, "none"),
    "fp8_per_channel": _Arithmetic("fp8", False, "fp8", torch.float8_e4m3fn, "both"),
    "fp8_block": _Arithmetic("fp8_block", False, "fp8_block", torch.float8_e4m3fn, "none"),
    "w4a8": _Arithmetic("w4a8", True, "int8", torch.int8, "both"),
    "int4_per_channel": _Arithmetic("int4", True, "halves", None, "weight"),
    "int4_group": _Arithmetic("int4", True, "halves", None, "none"),
    "int4_fp8": _Arithmetic("int4_fp8", True, "fp8_halves", torch.bfloat16, "both"),
    "mxfp4": _Arithmetic("mxfp4", True, "halves", None, "none"),
    "mxfp4_act": _Arithmetic("mxfp4", True, "mxfp4", torch.bfloat16, "none"),
}
_PROGRAMS = 1056  # of a product: eight to each of 132 processors; more would mostly find no tile of theirs
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class ExpertOptions:
    """How experts are run.

    Args:
        tiles: tile shapes; the shipped ones for the device and the number of pairs if None.
        add_TD: added after rounding, in x's type: the residual.
        shared: a shared expert's inner rows [T, i] and down weight [D, i]; its output is added with `add_TD`.
        codes: the rows as INT8 and their scales (see `row_codes`), where whoever chose the experts made them already.
        dependent: whether kernels may start while the one before them drains (`launch_options`).
        activation: what becomes of gate and up.
    """

    tiles: ExpertTiles | None = None
    add_TD: Tensor | None = None
    dependent: bool = False
    codes: tuple[Tensor, Tensor] | None = None
    shared: tuple[Tensor, Tensor] | None = None
    activation: Activation = SILU


def row_codes(x_TD: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor] | None:
    """Return buffers for rows as INT8 and for their scales, if experts of this format read such rows."""
    if weights.format != "w4a8":
        return None
    scale = torch.empty(x_TD.shape[0], 1, dtype=torch.float32, device=x_TD.device)
    return torch.empty(x_TD.shape, dtype=torch.int8, device=x_TD.device), scale


def experts(
    x_TD: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    options: ExpertOptions | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, as the reference does."""
    options = options or ExpertOptions()
    num_tokens, top_k = expert_ids_TK.shape
    architecture, arithmetic = architecture_of(x_TD.device), _arithmetic(gate_up, down)
    tiles = options.tiles or expert_tiles(architecture, gate_up.format, num_tokens * top_k)
    if "fp8" in gate_up.format and not has_fp8(architecture):
        raise KernelError(
            f"Experts of format {gate_up.format!r} need FP8 codes, which {architecture} has no types for."
        )
    run = _Run(x_TD, expert_ids_TK.contiguous(), arithmetic, options)
    plain = gate_up.bias_EN is None and down.bias_EN is None and options.activation == SILU
    if tiles.words and plain and gemv.fits(gate_up, down):
        return run.words((gate_up, down), weights_TK.contiguous(), tiles)
    rows, plan = run.rows(gate_up.num_experts, tiles.block_t)
    sums = run.product(rows, plan, gate_up, tiles.stage1, by_token=True)
    hidden = run.activate(sums, rows, gate_up)
    rows_PD = run.product(hidden, plan, down, tiles.stage2, by_token=False)[0]
    return run.combine(rows_PD, weights_TK.contiguous(), down.bias_EN)


@dataclass(frozen=True)
class _Rows:
    """Rows as a product reads them, and their scales where the format has some."""

    codes: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """The pairs by expert, and the tiles they are cut in (see `rows_kernel`)."""

    pairs: Tensor
    tiles: Tensor
    num_pairs: int
    max_tiles: int
    block_t: int


def _arithmetic(gate_up: ExpertWeights, down: ExpertWeights) -> _Arithmetic:
    assert gate_up.format == down.format, "a layer's experts have one format"
    if gate_up.format not in _FORMATS:
        raise KernelError(
            f"The Triton kernels know no experts of format {gate_up.format!r}; they know "
            f"{', '.join(sorted(_FORMATS))}. Choose the 'reference' kernels for it."
        )
    return _FORMATS[gate_up.format]


class _Run:
    """One call: its tokens, who goes where, and how."""

    def __init__(self, x_TD: Tensor, ids_TK: Tensor, arithmetic: _Arithmetic, options: ExpertOptions) -> None:
        self._x_TD = x_TD.contiguous()
        self._ids_TK = ids_TK
        self._top_k = ids_TK.shape[1]
        self._arithmetic = arithmetic
        self._activation = options.activation
        self._rest = options.add_TD, *(options.shared or (None, None))
        self._codes = None if options.codes is None else _Rows(*options.codes)
        instruction = matrix_instruction(architecture_of(x_TD.device))
        self._launch: dict[str, Any] = {"PDL": options.dependent, **launch_options(options.dependent, instruction)}

    def rows(self, num_experts: int, block_t: int) -> tuple[_Rows, _Plan]:
        """List each expert's tiles, and write tokens as the first product reads them."""
        num_tokens, width = self._x_TD.shape
        num_pairs = self._ids_TK.numel()
        max_tiles = min(num_pairs, num_pairs // block_t + min(num_pairs, num_experts))
        pairs = torch.empty(num_pairs, dtype=torch.int32, device=self._x_TD.device)
        cuts = torch.empty(3 * max_tiles + 1, dtype=torch.int32, device=self._x_TD.device)
        as_they_are = _Rows(self._x_TD, None) if self._arithmetic.input == "plain" else self._codes
        rows = as_they_are or self._empty_rows(num_tokens, width)
        rows_kernel[(num_experts + (0 if as_they_are else num_tokens),)](
            self._x_TD, rows.codes, rows.scale, self._ids_TK, pairs, cuts, num_pairs, max_tiles, num_experts, width,
            INPUT=self._arithmetic.input, BLOCK=_block(width), BINS=triton.next_power_of_2(num_experts + 1),
            BLOCK_T=block_t, STEP=min(PAIRS_PER_STEP, max(32, triton.next_power_of_2(num_pairs))), num_warps=4,
            **self._launch,
        )  # fmt: skip
        return rows, _Plan(pairs, cuts, num_pairs, max_tiles, block_t)

    def words(self, weights: tuple[ExpertWeights, ExpertWeights], weights_TK: Tensor, tiles: ExpertTiles) -> Tensor:
        """Return the sums of a few tokens, one pair at a time."""
        rows = self._codes
        if rows is None:
            rows = self._empty_rows(*self._x_TD.shape)
            quantize_kernel[(self._x_TD.shape[0],)](
                self._x_TD, rows.codes, rows.scale, self._x_TD.shape[1], BLOCK=_block(self._x_TD.shape[1]),
                num_warps=8, **self._launch,
            )  # fmt: skip
        assert rows.scale is not None
        launch, chosen = {"ASSEMBLY": _assembly(self._x_TD), **self._launch}, (self._ids_TK, weights_TK)
        out_TD = torch.empty_like(self._x_TD)
        return run_words((rows.codes, rows.scale), weights, chosen, tiles, self._rest, out_TD, launch)

    def product(self, rows: _Rows, plan: _Plan, weight: ExpertWeights, tiles: StageTiles, by_token: bool) -> Tensor:
        """Return sums [splits, pairs, outputs]: of tokens' rows before any scale, or of pairs' rows as numbers."""
        num_outputs, num_columns, name = weight.out_features, weight.in_features, self._arithmetic.name
        sums_dtype = torch.int32 if name == "w4a8" and by_token else torch.float32
        out = torch.empty(tiles.splits, plan.num_pairs, num_outputs, dtype=sums_dtype, device=rows.codes.device)
        blocks = triton.cdiv(num_outputs, tiles.block_n) * tiles.splits
        grid = (blocks, min(plan.max_tiles, triton.cdiv(_PROGRAMS, blocks)))
        shared: dict[str, Any] = {  # compile-time values of both kernels
            "ROWS_PER_INPUT": self._top_k if by_token else 1, "FORMAT": name, "BLOCK_T": plan.block_t,
            "BLOCK_N": tiles.block_n, "SPLITS": tiles.splits, "FINAL": not by_token,
            "EVEN": num_outputs % tiles.block_n == 0 and num_columns % tiles.block_k == 0,
            "num_warps": tiles.warps, "num_stages": tiles.stages, **self._launch,
        }  # fmt: skip
        scale = weight.scales.get("scale")
        if self._arithmetic.nibbles:
            half = num_columns // 2
            group_bytes = 0 if self._arithmetic.scales != "none" or scale is None else half // scale.shape[-1]
            nibble_kernel[grid](
                rows.codes, weight.codes.view(torch.int8), rows.scale, scale, weight.scales.get("scale_2"), plan.tiles,
                plan.pairs, out, plan.max_tiles, plan.num_pairs, num_outputs, half,
                GROUP_BYTES=group_bytes, BLOCK_B=tiles.block_k // 2, ASSEMBLY=_assembly(rows.codes), **shared,
            )  # fmt: skip
        else:
            number_kernel[grid](
                rows.codes, weight.codes, rows.scale, scale, plan.tiles, plan.pairs, out, plan.max_tiles,
                plan.num_pairs, num_outputs, num_columns, BLOCK_K=tiles.block_k, **shared,
            )  # fmt: skip
        return out

    def activate(self, sums: Tensor, x: _Rows, gate_up: ExpertWeights) -> _Rows:
        """Return silu(gate) * up of each pair, as the second product reads it."""
        splits, num_pairs, width = sums.shape[0], sums.shape[1], sums.shape[2] // 2
        hidden = self._empty_rows(num_pairs, width)
        activate_kernel[(num_pairs,)](
            sums, x.scale, gate_up.scales.get("scale"), gate_up.scales.get("scale_2"), gate_up.bias_EN, self._ids_TK,
            hidden.codes, hidden.scale, num_pairs, width, self._activation.limit, self._activation.alpha,
            TOP_K=self._top_k, SCALES=self._arithmetic.scales, SPLITS=splits, INPUT=self._arithmetic.input,
            ACTIVATION=self._activation.kind, TYPE=_TYPES[self._x_TD.dtype], BLOCK=_block(width),
            **self._launch,
        )  # fmt: skip
        return hidden

    def combine(self, rows_PD: Tensor, weights_TK: Tensor, bias_ED: Tensor | None) -> Tensor:
        """Add up each token's experts."""
        num_tokens, width = self._x_TD.shape[0], rows_PD.shape[1]
        out_TD = self._x_TD.new_empty(num_tokens, width)
        add_TD, _, shared_DI = self._rest
        combine_kernel[(triton.cdiv(width, SHARED_OUTPUTS), triton.cdiv(num_tokens, SHARED_TOKENS))](
            rows_PD, bias_ED, self._ids_TK, weights_TK, *self._rest, out_TD, num_tokens, width, TOP_K=self._top_k,
            ADD=add_TD is not None, SHARED=0 if shared_DI is None else shared_DI.shape[1], BLOCK_T=SHARED_TOKENS,
            BLOCK_N=SHARED_OUTPUTS, **self._launch,
        )  # fmt: skip
        return out_TD

    def _empty_rows(self, num_rows: int, width: int) -> _Rows:
        dtype, device = self._arithmetic.input_dtype, self._x_TD.device
        codes = torch.empty(num_rows, width, dtype=dtype or self._x_TD.dtype, device=device)
        if dtype is None or self._arithmetic.input == "mxfp4":
            return _Rows(codes, None)
        groups = triton.cdiv(width, 128) if self._arithmetic.input == "fp8_block" else 1
        return _Rows(codes, torch.empty(num_rows, groups, dtype=torch.float32, device=device))


def _block(width: int) -> int:
    return max(128, int(triton.next_power_of_2(width)))


def _assembly(tensor: Tensor) -> str:
    """Name the machine whose assembly a kernel may hold; the interpreter and AMD's compiler take the plain form."""
    return "cuda" if architecture_of(tensor.device).startswith("sm_") else "none"
