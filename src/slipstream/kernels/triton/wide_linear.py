"""Products of some hundred rows with a weight [N, K]: a program takes all rows of a pass, so weights are read once.

A token tile is one or two pieces whose widths are powers of two, 128 + 32 for 160 rows: the weight tile is multiplied
by each in turn, and no column is computed for rows that are not there. A pair of weight tiles shares the rows' tile
likewise; with SiLU they are gates and the rows `up` of the same outputs. Columns are added in the order of
`slipstream.kernels.triton.linear`: the same stretches, the same steps, the same matrix instruction.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913, SIM108

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.triton.launch import arrived_last, launch_options, wait_for_inputs
from slipstream.kernels.triton.linear import Epilogue, prefetch_rows, residual_stride
from slipstream.kernels.triton.tuning import WideConfig, few_rows_name, read_tuning
from slipstream.kernels.triton.variants import Matrix, Variant


@triton.jit
def _zeros(N: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr):
    if KIND == "int8":
        zeros = tl.zeros([N, M], tl.int32)
    else:
        zeros = tl.zeros([N, M], tl.float32)
    return zeros


@triton.jit
def _dot(w, x, acc, KIND: tl.constexpr):
    """Add the product of weights [N, K] and rows [M, K] to sums [N, M], as `linear` does."""
    x = tl.trans(x)
    if KIND == "int8":
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    elif KIND == "fp8":
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=128)
    elif KIND == "fp8_upcast":
        acc = tl.dot(w.to(tl.bfloat16), x.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _tile(
    source, first, row_end, stride, k, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Load rows [ROWS, BLOCK_K] from `first` on; rows from `row_end` on and columns from K on are zeros."""
    if TMA:
        tile = source.load([first, k])
    else:
        rows = first + tl.arange(0, ROWS)
        columns = k + tl.arange(0, BLOCK_K)
        at = source + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        real = (rows < row_end)[:, None]
        if not EVEN_K:
            real = real & (columns < K)[None, :]
        tile = tl.load(at, mask=real, other=0.0)
    return tile


@triton.jit
def _keep(part, partial_ptr, at, N: tl.constexpr, M: tl.constexpr):
    inside = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(partial_ptr + at + inside, part)


@triton.jit
def _added(partial_ptr, at, stride, SPLITS: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Add the stretches' parts in their order."""
    inside = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    total = tl.load(partial_ptr + at + inside, cache_modifier=".cg")
    for split in range(1, SPLITS):
        total += tl.load(partial_ptr + at + split * stride + inside, cache_modifier=".cg")
    return total


@triton.jit
def _numbers(
    total, m_first, n_first, x_scale_ptr, w_scale_ptr, bias_ptr, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Turn sums into numbers: codes by their scales, then the bias."""
    rows_N = tl.minimum(n_first + tl.arange(0, BLOCK_N), N - 1)
    total = total.to(tl.float32)
    if KIND != "dense":
        x_scale = tl.load(x_scale_ptr + tl.minimum(m_first + tl.arange(0, BLOCK_M), M - 1))
        total = total * (x_scale[None, :] * tl.load(w_scale_ptr + rows_N)[:, None])
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows_N).to(tl.float32)[:, None]
    return total


@triton.jit
def _store(
    total, m_first, n_first, residual_ptr, y_ptr, M, num_outputs, residual_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Round numbers [BLOCK_N, BLOCK_M], add the residual and round again, as torch would."""
    dtype = y_ptr.dtype.element_ty
    out = tl.trans(total.to(dtype))
    m = (m_first + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (n_first + tl.arange(0, BLOCK_N))[None, :]
    real = (m < M) & (n < num_outputs)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m * residual_stride + n, mask=real, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + residual).to(dtype)
    tl.store(y_ptr + m * y_stride + n, out, mask=real)


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up, each rounded as torch would."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _finish(
    one, two, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
    residual_stride, y_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Finish the sums of one piece of the rows: those of one weight tile, or of gates and `up`."""
    num_outputs = N // 2 if SILU else N
    one = _numbers(one, m_first, n_first, x_scale_ptr, w_scale_ptr, bias_ptr, M, N, BLOCK_M, BLOCK_N, KIND, HAS_BIAS)
    if SILU:
        two = _numbers(
            two, m_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, M, N, BLOCK_M, BLOCK_N, KIND, HAS_BIAS
        )
        one = _gated(one, two, y_ptr.dtype.element_ty)
    _store(
        one, m_first, n_first, residual_ptr, y_ptr, M, num_outputs, residual_stride, y_stride, BLOCK_M, BLOCK_N,
        HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _finish_piece(
    one, two, partial_ptr, at, stride, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
    y_ptr, M, N, residual_stride, y_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr,
    AFTER: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Finish one piece of the rows; stretches that were kept are added first, a tile at a time to spare registers.

    Args:
        AFTER: numbers from a kept tile to that of the pair's second.
    """
    if SPLITS > 1:
        one = _added(partial_ptr, at, stride, SPLITS, BLOCK_N, BLOCK_M)
        if SILU:
            two = _added(partial_ptr, at + AFTER, stride, SPLITS, BLOCK_N, BLOCK_M)
    _finish(
        one, two, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
        residual_stride, y_stride, BLOCK_M, BLOCK_N, KIND, SILU, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    if PAIR and not SILU:
        if SPLITS > 1:
            two = _added(partial_ptr, at + AFTER, stride, SPLITS, BLOCK_N, BLOCK_M)
        _finish(
            two, two, m_first, n_second, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
            residual_stride, y_stride, BLOCK_M, BLOCK_N, KIND, SILU, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "steps"])
def _wide_kernel(
    x_first, x_second, w_tiles, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr,
    counter_ptr, M, N, K, steps, x_stride, residual_stride, y_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, KIND: tl.constexpr, SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n_tile, m_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    REST: tl.constexpr = SECOND if SECOND > 0 else 16
    m_first = m_tile * (FIRST + SECOND)
    m_second = m_first + FIRST
    num_outputs = N // 2 if SILU else N
    WIDTH: tl.constexpr = BLOCK_N if SILU or not PAIR else 2 * BLOCK_N
    n_first = n_tile * WIDTH
    n_second = n_first + (num_outputs if SILU else BLOCK_N)
    if PDL:
        LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        rows_N = tl.minimum(n_first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[:, None]
        prefetch_rows(w_ptr + rows_N * K, split * steps * BLOCK_K, K, LINE)
        if PAIR:
            rows_N = tl.minimum(n_second + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[:, None]
            prefetch_rows(w_ptr + rows_N * K, split * steps * BLOCK_K, K, LINE)
    wait_for_inputs(PDL)
    one, one_rest = _zeros(BLOCK_N, FIRST, KIND), _zeros(BLOCK_N, REST, KIND)
    two, two_rest = _zeros(BLOCK_N, FIRST, KIND), _zeros(BLOCK_N, REST, KIND)
    for step in range(steps):
        k = (split * steps + step) * BLOCK_K
        w = _tile(w_tiles, n_first, N, K, k, K, BLOCK_N, BLOCK_K, TMA, EVEN_K)
        x = _tile(x_first, m_first, M, x_stride, k, K, FIRST, BLOCK_K, TMA, EVEN_K)
        one = _dot(w, x, one, KIND)
        if SECOND > 0:
            rest = _tile(x_second, m_second, M, x_stride, k, K, SECOND, BLOCK_K, TMA, EVEN_K)
            one_rest = _dot(w, rest, one_rest, KIND)
        if PAIR:
            w = _tile(w_tiles, n_second, N, K, k, K, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            two = _dot(w, x, two, KIND)
            if SECOND > 0:
                two_rest = _dot(w, rest, two_rest, KIND)
    finished = True
    TILES: tl.constexpr = 2 if PAIR else 1
    AFTER_ONE: tl.constexpr = BLOCK_N * FIRST
    AFTER_REST: tl.constexpr = BLOCK_N * (FIRST + SECOND)
    tile = m_tile * tl.num_programs(0) + n_tile
    stride = (tl.num_programs(0) * tl.num_programs(1)).to(tl.int64) * (TILES * AFTER_REST)
    at = tile.to(tl.int64) * (TILES * AFTER_REST)
    if SPLITS > 1:
        own = at + split * stride
        _keep(one, partial_ptr, own, BLOCK_N, FIRST)
        if SECOND > 0:
            _keep(one_rest, partial_ptr, own + AFTER_ONE, BLOCK_N, REST)
        if PAIR:
            _keep(two, partial_ptr, own + AFTER_REST, BLOCK_N, FIRST)
            if SECOND > 0:
                _keep(two_rest, partial_ptr, own + AFTER_REST + AFTER_ONE, BLOCK_N, REST)
        finished = arrived_last(counter_ptr + tile, SPLITS)
    if finished:
        _finish_piece(
            one, two, partial_ptr, at, stride, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr,
            residual_ptr, y_ptr, M, N, residual_stride, y_stride, FIRST, BLOCK_N, PAIR, AFTER_REST, SPLITS, KIND, SILU,
            HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
        if SECOND > 0:
            _finish_piece(
                one_rest, two_rest, partial_ptr, at + AFTER_ONE, stride, m_second, n_first, n_second, x_scale_ptr,
                w_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N, residual_stride, y_stride, REST, BLOCK_N, PAIR,
                AFTER_REST, SPLITS, KIND, SILU, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip


@dataclass(frozen=True)
class WideLaunch:
    """How a product of many rows runs.

    Args:
        config: tiles that fit the pass (see `fitted`).
        pieces: widths of the two pieces of the token tile; the second may be 0.
        splits: the stretches columns are cut in, each a program's.
        stretch: the columns of one of them.
        counters: zeros, as in `slipstream.kernels.triton.linear.Launch`.
        dependent: whether the kernel may start while the one before it drains.
        instruction: see `launch_options`.
    """

    config: WideConfig
    pieces: tuple[int, int]
    splits: int
    stretch: int
    counters: Tensor
    dependent: bool
    instruction: int = 0

    def grid(self, num_rows: int, num_outputs: int, silu: bool) -> tuple[int, int, int]:
        """Return programs over outputs, tokens and stretches of columns."""
        outputs = num_outputs // 2 if silu else num_outputs
        width = self.config.block_n * (2 if self.config.pair and not silu else 1)
        return -(-outputs // width), -(-num_rows // sum(self.pieces)), self.splits


def row_pieces(num_rows: int) -> tuple[int, int]:
    """Return the narrowest token tile of at most two powers of two that takes so many rows, or 256 of them."""
    tiles = ((16, 0), (32, 0), (32, 16), (64, 0), (64, 32), (128, 0), (128, 32), (128, 64))
    return next((tile for tile in tiles if num_rows <= sum(tile)), (128, 128))


def fitted(config: WideConfig, pieces: tuple[int, int], kind: str, silu: bool, shared_bytes: int) -> WideConfig:
    """Return tiles whose sums stay in registers and whose stages fit the fast memory; neither changes bits.

    With SiLU a program needs the pair: tiles of its own are cut in gates and the rows `up`.
    """
    # An FP8 product keeps two sums of every number: the matrix unit's, and the whole one they go into.
    most_sums = 80 if kind == "fp8" else 160
    if silu and not config.pair:
        config = replace(config, pair=True, block_n=max(config.block_n // 2, 64))
    while config.block_n * (1 + config.pair) * sum(pieces) > most_sums * 32 * config.num_warps:
        if config.pair and not silu:
            config = replace(config, pair=False)
        elif config.block_n > 64:
            config = replace(config, block_n=config.block_n // 2)
        elif config.num_warps < 8:
            config = replace(config, num_warps=2 * config.num_warps)
        else:
            break
    itemsize = 2 if kind == "dense" else 1
    step_bytes = (config.block_n * (1 + config.pair) + sum(pieces)) * config.block_k * itemsize
    most = (shared_bytes or step_bytes * config.num_stages) // step_bytes
    return replace(config, num_stages=max(min(config.num_stages, most), 1))


def multiply_wide(
    x_TK: Tensor, weight_NK: Tensor, scales: tuple[Tensor, Tensor] | None, kind: str, epilogue: Epilogue,
    launch: WideLaunch, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return rows times the weight: what `slipstream.kernels.triton.linear.multiply` gives, to the bit."""
    num_rows, num_outputs, num_inputs = x_TK.shape[0], *weight_NK.shape
    config, (first, second), silu = launch.config, launch.pieces, epilogue.silu
    grid = launch.grid(num_rows, num_outputs, silu)
    y = torch.empty(num_rows, num_outputs // 2 if silu else num_outputs, dtype=out_dtype, device=x_TK.device)
    partial = y
    if launch.splits > 1:
        assert grid[0] * grid[1] <= launch.counters.numel(), "every shared tile has a counter"
        size = grid[0] * grid[1] * grid[2] * config.block_n * (1 + config.pair) * (first + second)
        partial = torch.empty(size, dtype=torch.int32 if kind == "int8" else torch.float32, device=y.device)
    x_scale, w_scale = scales or (x_TK, x_TK)
    tma = config.tma and _fits_copy_engine(x_TK) and _fits_copy_engine(weight_NK)
    tiles = [_tiles(x_TK, first, config, tma), _tiles(x_TK, second or 16, config, tma),
             _tiles(weight_NK, config.block_n, config, tma)]  # fmt: skip
    _wide_kernel[grid](
        *tiles, weight_NK, x_scale, w_scale, y if epilogue.bias_N is None else epilogue.bias_N,
        y if epilogue.residual_TN is None else epilogue.residual_TN, y, partial, launch.counters,
        num_rows, num_outputs, num_inputs, launch.stretch // config.block_k, x_TK.stride(0),
        residual_stride(epilogue), y.stride(0),
        FIRST=first, SECOND=second, BLOCK_N=config.block_n, PAIR=config.pair, BLOCK_K=config.block_k,
        SPLITS=launch.splits, EVEN_K=num_inputs == launch.stretch * launch.splits, TMA=tma, KIND=kind, SILU=silu,
        HAS_BIAS=epilogue.bias_N is not None, HAS_RESIDUAL=epilogue.residual_TN is not None, PDL=launch.dependent,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    )  # fmt: skip
    return y


def _fits_copy_engine(x_TK: Tensor) -> bool:
    """Tell whether rows start where the copy engine can read: at multiples of 16 bytes."""
    return x_TK.data_ptr() % 16 == 0 and x_TK.stride(0) * x_TK.element_size() % 16 == 0


def _tiles(x_TK: Tensor, num_rows: int, config: WideConfig, tma: bool) -> Any:  # triton has no types of its own
    if not tma:
        return x_TK
    return TensorDescriptor(x_TK, list(x_TK.shape), [x_TK.stride(0), 1], [num_rows, config.block_k])


_POINTERS = {"dense": "bf16", "int8": "i8", "fp8": "fp8e4nv", "fp8_upcast": "fp8e4nv"}
_MATRIX: dict[str, Matrix] = {"dense": "bf16", "int8": "int8", "fp8": "fp8", "fp8_upcast": "bf16"}


def variants(architecture: str) -> list[Variant]:
    """List what ships: each format's tiles by format and by shape, for 96, 160 and 256 rows, whole and split."""
    tuning = read_tuning(architecture)
    shipped: dict[str, Variant] = {}
    for name, config in tuning.wide_linear.items():
        format = name.partition(":")[0]
        kind = "fp8_upcast" if format == "fp8" and not tuning.fp8_dot else format
        many = ((96, False), (160, False), (160, True), (256, True))
        for num_rows, silu in ((40, False), (64, True)) if name == few_rows_name(name.partition("/")[0]) else many:
            pieces = row_pieces(num_rows)
            used = fitted(config, pieces, kind, silu, tuning.shared_bytes)
            variant = _variant(f"wide {kind} {num_rows} rows", kind, used, pieces, silu=silu)
            shipped[f"{variant.name} {used}"] = variant
    return list(shipped.values())


def _variant(name: str, kind: str, config: WideConfig, pieces: tuple[int, int], *, silu: bool) -> Variant:
    code, (first, second) = _POINTERS[kind], pieces
    widths = (first, second or 16, config.block_n)
    sources = [f"tensordesc<{code}[{n}, {config.block_k}]>" if config.tma else f"*{code}" for n in widths]
    signature = {
        "x_first": sources[0], "x_second": sources[1], "w_tiles": sources[2], "w_ptr": f"*{code}",
        "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16", "residual_ptr": "*bf16", "y_ptr": "*bf16",
        "partial_ptr": "*i32" if kind == "int8" else "*fp32", "counter_ptr": "*i32", "M": "i32", "N": "i32", "K": "i32",
        "steps": "i32", "x_stride": "i32", "residual_stride": "i32", "y_stride": "i32",
    }  # fmt: skip
    constants = {
        "FIRST": first, "SECOND": second, "BLOCK_N": config.block_n, "PAIR": config.pair, "BLOCK_K": config.block_k,
        "SPLITS": 1 if silu else 4, "EVEN_K": True, "TMA": config.tma, "KIND": kind, "SILU": silu, "HAS_BIAS": False,
        "HAS_RESIDUAL": not silu, "PDL": False,
    }  # fmt: skip
    tiles = f" {2 if config.pair else 1}x{config.block_n}{', silu' if silu else ', split'}"
    divisible = tuple(
        arg for arg, type in signature.items() if arg not in ("M", "steps") and not type.startswith("tensordesc")
    )
    return Variant(
        name + tiles, _wide_kernel, signature, constants, config.num_warps, config.num_stages, _MATRIX[kind], divisible
    )
