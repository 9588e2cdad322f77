"""Products of a few rows with a weight [N, K], one number to a code: dense, FP8 and INT8.

Weights are the left side of the matrix product and tokens the right one, so that sixteen tokens fill a tile. The
columns are cut in `SPLITS` splits whose sums are added in order: by one program (SERIAL), or by the last of several
that share an output tile. Either way a number is the same sum, whatever the number of rows.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import arrived_last, launch_options, prefetch, show_copies, wait_for_inputs
from slipstream.kernels.triton.rope import RopeWrite
from slipstream.kernels.triton.tuning import LinearConfig


@triton.jit
def weight_rows(n, n_tile, N, BLOCK_N: tl.constexpr, SILU: tl.constexpr, PROGRAM_N: tl.constexpr):
    """Return the weight rows of places `n` in a tile; with SILU half are gates, half the rows `up` of the same outputs.

    Args:
        PROGRAM_N: so many rows of the tile are its own (of each half, half as many); the others are anybody's.
    """
    if SILU:
        HALF: tl.constexpr = BLOCK_N // 2
        j = tl.minimum(n_tile * (PROGRAM_N // 2) + n % HALF, N // 2 - 1)
        return (n // HALF) * (N // 2) + j
    return tl.minimum(n_tile * PROGRAM_N + n, N - 1)


@triton.jit
def prefetch_rows(w_at, k_from, K, LINE: tl.constexpr):
    """Prefetch the first eight lines of each row to L2, before the PDL wait."""
    prefetch(w_at + tl.minimum(k_from + tl.arange(0, 8) * LINE, K - 1)[None, :])


@triton.jit
def reduce_splits(
    total, partial_ptr, counter_ptr, tile, num_tiles, split, SPLITS: tl.constexpr, N: tl.constexpr, M: tl.constexpr
):
    """Store this program's partial sum [N, M] of a tile; the last program of the tile adds all, in their order.

    Returns the sum, and whether it is whole: whether this program is the last.
    """
    inside = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    stride = num_tiles.to(tl.int64) * (N * M)
    at = partial_ptr + tile.to(tl.int64) * (N * M) + inside
    tl.store(at + split * stride, total)
    finished = arrived_last(counter_ptr + tile, SPLITS)
    if finished:
        total = tl.load(at, cache_modifier=".cg")
        for other in range(1, SPLITS):
            total += tl.load(at + other * stride, cache_modifier=".cg")
    return total, finished


@triton.jit
def store_outputs(
    total, m_tile, n_tile, bias_ptr, residual_ptr, y_ptr, M, N, residual_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PROGRAM_N: tl.constexpr,
):  # fmt: skip
    """Finish float32 sums [BLOCK_N, BLOCK_M]: bias, silu(gate) * up, residual, each rounded as torch would.

    Returns what was stored, [BLOCK_M, outputs], zero past the last output of the tile.
    """
    dtype = y_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    OWN: tl.constexpr = PROGRAM_N // 2 if SILU else PROGRAM_N
    num_outputs = N // 2 if SILU else N
    if HAS_RESIDUAL:  # on its way while the sums are finished
        m = (m_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        n = (n_tile * OWN + tl.arange(0, WIDTH))[None, :]
        real = (m < M) & (n < num_outputs)
        residual = tl.load(residual_ptr + m * residual_stride + n, mask=real, other=0.0)
    if HAS_BIAS:
        rows_N = weight_rows(tl.arange(0, BLOCK_N), n_tile, N, BLOCK_N, SILU, PROGRAM_N)
        total += tl.load(bias_ptr + rows_N).to(tl.float32)[:, None]
    if SILU:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, WIDTH, BLOCK_M)), (1, 2, 0)))
        gate = gate.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = silu * up.to(dtype).to(tl.float32)
    out = tl.trans(total.to(dtype))
    m = (m_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (n_tile * OWN + tl.arange(0, WIDTH))[None, :]
    real = (m < M) & (n < tl.minimum((n_tile + 1) * OWN, num_outputs))
    if HAS_RESIDUAL:
        out = (out.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(y_ptr + m * y_stride + n, out, mask=real)
    return tl.where(real, out, 0.0)


@triton.jit
def _multiply_split(
    w_at, x_at, real_M, split, steps, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, KIND: tl.constexpr, STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one split of K, `steps` tiles long; rows past the last are zeros, which nobody reads."""
    ZERO: tl.constexpr = 0 if KIND == "int8" else 0.0
    if KIND == "int8":
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    for step in range(steps):
        k = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(w_at + k[None, :], eviction_policy=POLICY)
            x = tl.load(x_at + k[:, None], mask=real_M, other=ZERO)
        else:
            w = tl.load(w_at + k[None, :], mask=k[None, :] < K, other=ZERO, eviction_policy=POLICY)
            x = tl.load(x_at + k[:, None], mask=real_M & (k[:, None] < K), other=ZERO)
        show_copies(PDL)
        if KIND == "int8":
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
        elif KIND == "fp8":
            # Hopper keeps few bits inside an FP8 sum: whole float32 sums are made every 128 columns, in tiles of any.
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=128 if BLOCK_K > 128 else BLOCK_K)
        elif KIND == "fp8_upcast":
            acc = tl.dot(w.to(tl.bfloat16), x.to(tl.bfloat16), acc)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M", "steps"])
def _linear_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr,
    M, N, K, steps, x_stride, residual_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, SERIAL: tl.constexpr,
    EVEN_K: tl.constexpr, KIND: tl.constexpr, STREAM: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m_tile, n_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_N = weight_rows(tl.arange(0, BLOCK_N), n_tile, N, BLOCK_N, SILU, BLOCK_N)
    rows_M = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real_M = (rows_M < M)[None, :]
    rows_M = tl.minimum(rows_M, M - 1)
    w_at = w_ptr + rows_N.to(tl.int64)[:, None] * K
    x_at = x_ptr + rows_M.to(tl.int64)[None, :] * x_stride
    if PDL:
        LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        prefetch_rows(w_at, split * steps * BLOCK_K, K, LINE)
    wait_for_inputs(PDL)
    total = _multiply_split(w_at, x_at, real_M, split, steps, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, KIND, STREAM, PDL)
    finished = True
    if SPLITS > 1:
        if SERIAL:
            for other in range(1, SPLITS):
                total += _multiply_split(
                    w_at, x_at, real_M, other, steps, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, KIND, STREAM, PDL
                )
        else:
            tile = m_tile * tl.num_programs(1) + n_tile
            num_tiles = tl.num_programs(0) * tl.num_programs(1)
            total, finished = reduce_splits(
                total, partial_ptr, counter_ptr, tile, num_tiles, split, SPLITS, BLOCK_N, BLOCK_M
            )
    if finished:
        sums = total.to(tl.float32)
        if KIND != "dense":
            x_scale = tl.load(x_scale_ptr + rows_M)
            sums = sums * (x_scale[None, :] * tl.load(w_scale_ptr + rows_N)[:, None])
        store_outputs(
            sums, m_tile, n_tile, bias_ptr, residual_ptr, y_ptr, M, N, residual_stride, y_stride, BLOCK_M, BLOCK_N,
            SILU, HAS_BIAS, HAS_RESIDUAL, BLOCK_N,
        )  # fmt: skip


@dataclass(frozen=True)
class FoldedNorm:
    """A norm that a product applies to its rows: its weight, and the rows' sums of squares, left by another product.

    Args:
        squares_TB: one sum for every 64 numbers of a row or fewer, see `small_m_launch.squares_of`.
    """

    weight_D: Tensor
    eps: float
    squares_TB: Tensor


@dataclass(frozen=True)
class Rows:
    """Rows on their way into a product: numbers, with a norm still to apply or not, or codes and a scale each.

    Args:
        maxima_TB: the largest magnitudes of splits of a row, from which a product with FP8 weights makes its codes.
    """

    values_TK: Tensor
    scale_T: Tensor | None
    dtype: torch.dtype
    norm: FoldedNorm | None = None
    maxima_TB: Tensor | None = None


@dataclass(frozen=True)
class Epilogue:
    """What a product does with its sums before they are stored.

    Args:
        squares_TB: where sums of squares of the outputs go, for the norm that follows (products of a few rows).
        maxima_TB: where the largest magnitude of each tile of outputs goes, for the codes that follow (likewise).
        rope: the outputs are heads: queries are rotated, keys and values written to the cache (products of a few rows).
    """

    bias_N: Tensor | None = None
    residual_TN: Tensor | None = None
    silu: bool = False
    squares_TB: Tensor | None = None
    maxima_TB: Tensor | None = None
    rope: RopeWrite | None = None

    @property
    def flags(self) -> dict[str, bool]:
        """Compile-time arguments of every GEMM."""
        return {"HAS_BIAS": self.bias_N is not None, "HAS_RESIDUAL": self.residual_TN is not None}

    @property
    def residual_stride(self) -> int:
        """Elements from one row of the residual to the next."""
        return 0 if self.residual_TN is None else self.residual_TN.stride(0)

    def added(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return bias and residual; an absent one is stood in for by the output, which is not read."""
        return y if self.bias_N is None else self.bias_N, y if self.residual_TN is None else self.residual_TN


@dataclass(frozen=True)
class Launch:
    """How a product runs.

    Args:
        block_m: the width of the token tile.
        split_columns: those of one split of K, a multiple of the tile's, so that they are the same for all tiles.
        serial: one program adds all splits of its tile, where there are tokens enough to fill the device.
        counters: zeros, which programs that share a tile count themselves in with, and leave as zeros.
        dependent: whether the kernel may start while the one before it drains.
        instruction: see `launch_options`.
    """

    config: LinearConfig
    block_m: int
    split_columns: int
    serial: bool
    counters: Tensor
    dependent: bool
    instruction: int = 0

    def grid(self, num_rows: int, num_outputs: int, silu: bool) -> tuple[int, int, int]:
        """Return programs over tokens, outputs and splits of K."""
        outputs = num_outputs // 2 if silu else num_outputs
        width = self.config.outputs // 2 if silu else self.config.outputs
        splits = 1 if self.serial or self.config.sliced_k else self.config.split_k
        return -(-num_rows // self.block_m), -(-outputs // width), splits


def token_tile(num_rows: int) -> int:
    """Return the width of a narrow token tile for a pass of so many rows."""
    return next((tile for tile in (16, 32) if num_rows <= tile), 64)


def multiply(
    x_TK: Tensor, weight_NK: Tensor, scales: tuple[Tensor, Tensor] | None, kind: str, epilogue: Epilogue,
    launch: Launch, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return rows times the weight; `scales` are the rows' and the outputs', for codes.

    Args:
        x_TK: rows whose last dimension is contiguous.
        kind: "dense", "int8", "fp8" or "fp8_upcast".
    """
    leaves_nothing = epilogue.squares_TB is None and epilogue.maxima_TB is None
    assert leaves_nothing and epilogue.rope is None, "only products of a few rows fold these in"
    num_rows, num_outputs, num_inputs = x_TK.shape[0], *weight_NK.shape
    config = launch.config
    grid = launch.grid(num_rows, num_outputs, epilogue.silu)
    y = torch.empty(num_rows, num_outputs // 2 if epilogue.silu else num_outputs, dtype=out_dtype, device=x_TK.device)
    x_scale, w_scale = scales or (x_TK, x_TK)
    _linear_kernel[grid](
        x_TK, weight_NK, x_scale, w_scale, *epilogue.added(y), y, partial_sums(launch, grid, y, kind == "int8"),
        launch.counters, num_rows, num_outputs, num_inputs, launch.split_columns // config.block_k, x_TK.stride(0),
        epilogue.residual_stride, y.stride(0),
        BLOCK_M=launch.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.split_k,
        SERIAL=launch.serial, EVEN_K=num_inputs == launch.split_columns * config.split_k, KIND=kind,
        STREAM=grid[0] == 1, SILU=epilogue.silu, **epilogue.flags, PDL=launch.dependent,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    )  # fmt: skip
    return y


def partial_sums(launch: Launch, grid: tuple[int, int, int], y: Tensor, whole: bool) -> Tensor:
    """Return a workspace for the partial sums, if several programs share a tile."""
    if grid[2] == 1:
        return y
    assert grid[0] * grid[1] <= launch.counters.numel(), "every shared tile has a counter"
    size = grid[0] * grid[1] * grid[2] * launch.config.block_n * launch.block_m
    return torch.empty(size, dtype=torch.int32 if whole else torch.float32, device=y.device)
