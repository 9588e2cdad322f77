"""Products of some hundred rows with a weight [N, K]: a program takes all rows of a pass, so weights are read once."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.triton.gemm.hopper_ws_launch import tma_boxes
from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.gemm.wide_tiles import wide_kernel
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import FEW_ROWS, LinearConfig, Tuning, WideConfig


@dataclass(frozen=True)
class WideLaunch:
    """How a product of many rows runs.

    Args:
        config: tiles that fit the pass (see `fitted`).
        pieces: widths of the two pieces of the token tile; the second may be 0.
        splits: the splits columns are cut in, each a program's.
        split_columns: those of one of them.
        counters: zeros, as in `slipstream.kernels.triton.gemm.split_k.Launch`.
        dependent: whether the kernel may start while the one before it drains.
        instruction: see `launch_options`.
        waits_first: whether the next kernel may start only once this one's inputs are there.
    """

    config: WideConfig
    pieces: tuple[int, int]
    splits: int
    split_columns: int
    counters: Tensor
    dependent: bool
    instruction: int = 0
    waits_first: bool = False

    def grid(self, num_rows: int, num_outputs: int, silu: bool) -> tuple[int, int, int]:
        """Return programs over outputs, tokens and splits of K."""
        outputs = num_outputs // 2 if silu else num_outputs
        width = self.config.block_n * (2 if self.config.pair and not silu else 1)
        return -(-outputs // width), -(-num_rows // sum(self.pieces)), self.splits


_BOUND_BY_PRODUCTS = 160
"""With more rows to a tile, programs wait for the matrix units, not for weights: a step is always under way."""


def row_pieces(num_rows: int) -> tuple[int, int]:
    """Return the narrowest token tile of at most two powers of two with which the fewest tiles take so many rows."""
    each = -(-num_rows // -(-num_rows // 256))
    tiles = ((16, 0), (32, 0), (32, 16), (64, 0), (64, 32), (128, 0), (128, 32), (128, 64))
    return next((tile for tile in tiles if each <= sum(tile)), (128, 128))


def stream_config(
    format: str, weight_shape: tuple[int, int], num_rows: int, silu: bool, narrow: LinearConfig, tuning: Tuning
) -> WideConfig | None:
    """Return tiles of `wide_streams` by arithmetic, for any weight [N, K] that no configuration names.

    Programs have 64 weight rows, or 128 (a pair that shares its loads of the rows) where enough programs are left, and
    as many stages as fit; where there are more programs than SMs, as fit twice. None: other GPUs, short columns, which
    end before a ring pays, and weights whose programs would leave half of the SMs idle.
    """
    (num_outputs, num_inputs), fp8 = weight_shape, format == "fp8"
    num_sms, splits = tuning.programs // 2, narrow.split_k
    programs = -(-num_outputs // 64) * splits
    if tuning.architecture != "sm_90" or format not in _STREAMED_FROM or num_rows < _STREAMED_FROM[format]:
        return None
    if num_inputs < _LEAST_COLUMNS or programs * 2 < num_sms:
        return None
    many = num_rows > FEW_ROWS
    head = splits == 1 and not silu and programs >= 8 * num_sms
    pair = silu or (many and not fp8 and programs * 4 >= num_sms * 6)
    block_n = 128 if head else 64
    programs = -(-num_outputs // (block_n * (1 + pair))) * splits
    shared = programs > num_sms and not head
    block_k = min(128 if fp8 else 64, narrow.block_k)
    step_bytes = (block_n * (1 + pair) + sum(row_pieces(num_rows))) * block_k * (1 if fp8 else 2)
    return WideConfig(
        block_n, pair, block_k, 8 if head else 4, max(tuning.shared_bytes // (1 + shared) // step_bytes, 1),
        tma=True, deferred=splits > 1, together=fp8, warp_specialised=True, at_once=shared and many,
    )  # fmt: skip


_STREAMED_FROM = {"dense": 9, "fp8": 17}
"""Rows from which a format's weights are streamed where no configuration says otherwise; below it is `small_m`."""
_LEAST_COLUMNS = 1024


def fitted(config: WideConfig, pieces: tuple[int, int], kind: str, silu: bool, shared_bytes: int) -> WideConfig:
    """Return tiles whose sums stay in registers and whose stages fit the shared memory; neither changes bits.

    With SiLU a program needs the pair: tiles of its own are cut in gates and the rows `up`.
    """
    most_sums = 160
    if silu and not config.pair:
        config = replace(config, pair=True, block_n=max(config.block_n // 2, 64))
    apart = config.together and kind == "fp8"
    if apart:  # these sums, and beside them one piece's of the step
        assert config.block_k <= 128, "matrix units make FP8 sums whole every 128 columns"
        most_sums = most_sums * 7 // 5
    while config.block_n * ((1 + config.pair) * sum(pieces) + apart * pieces[0]) > most_sums * 32 * config.num_warps:
        if config.pair and not silu:
            config = replace(config, pair=False)
        elif config.block_n > 64:
            config = replace(config, block_n=config.block_n // 2)
        elif config.num_warps < 8:
            config = replace(config, num_warps=2 * config.num_warps)
        else:
            break
    many = sum(pieces) > _BOUND_BY_PRODUCTS
    if many:
        config = replace(config, at_once=False)
    itemsize = 2 if kind == "dense" else 1
    step_bytes = (config.block_n * (1 + config.pair) + sum(pieces)) * config.block_k * itemsize
    most = (shared_bytes or step_bytes * config.num_stages) // step_bytes
    return replace(config, num_stages=max(min(max(config.num_stages, 4 * many), most), 1))


def multiply_wide(
    x_TK: Tensor, weight_NK: Tensor, scales: tuple[Tensor, Tensor] | None, kind: str, epilogue: Epilogue,
    launch: WideLaunch, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return rows times the weight: what `slipstream.kernels.triton.gemm.split_k.multiply` gives, to the bit.

    With `deferred` the partial sums [splits, T, N] instead, for `slipstream.kernels.triton.gemm.split_k_reduce`.
    """
    num_rows, num_outputs, num_inputs = x_TK.shape[0], *weight_NK.shape
    config, (first, second), silu = launch.config, launch.pieces, epilogue.silu
    grid = launch.grid(num_rows, num_outputs, silu)
    if config.deferred:
        assert epilogue == Epilogue() and kind != "int8", "only plain float32 sums are left for later"
        y = partial = torch.empty(grid[2], num_rows, num_outputs, dtype=torch.float32, device=x_TK.device)
    else:
        y = torch.empty(num_rows, num_outputs // 2 if silu else num_outputs, dtype=out_dtype, device=x_TK.device)
        partial = y
    if grid[2] > 1 and not config.deferred:
        assert grid[0] * grid[1] <= launch.counters.numel(), "every shared tile has a counter"
        size = grid[0] * grid[1] * grid[2] * config.block_n * (1 + config.pair) * (first + second)
        partial = torch.empty(size, dtype=torch.int32 if kind == "int8" else torch.float32, device=y.device)
    x_scale, w_scale = scales or (x_TK, x_TK)
    tma = config.tma and _fits_copy_engine(x_TK) and _fits_copy_engine(weight_NK)
    if config.warp_specialised and tma and _streams(kind, epilogue, launch):
        _stream(x_TK, weight_NK, (x_scale, w_scale), kind, y, launch, grid)
        return y
    tiles = [_tiles(x_TK, first, config, tma), _tiles(x_TK, second or 16, config, tma),
             _tiles(weight_NK, config.block_n, config, tma)]  # fmt: skip
    wide_kernel[grid](
        *tiles, weight_NK, x_scale, w_scale, *epilogue.added(y), y, partial, launch.counters,
        num_rows, num_outputs, num_inputs, launch.split_columns // config.block_k, x_TK.stride(0),
        epilogue.residual_stride, y.stride(0),
        FIRST=first, SECOND=second, BLOCK_N=config.block_n, PAIR=config.pair, BLOCK_K=config.block_k,
        SPLITS=1 if config.deferred else launch.splits, DEFERRED=config.deferred,
        EVEN_K=num_inputs == launch.split_columns * launch.splits, TMA=tma, KIND=kind, SILU=silu,
        **epilogue.flags, PREFETCH=config.prefetch, TOGETHER=config.together, WAITS_FIRST=launch.waits_first,
        PDL=launch.dependent,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    )  # fmt: skip
    return y


def _streams(kind: str, epilogue: Epilogue, launch: WideLaunch) -> bool:
    """Tell whether the warp-specialised kernel multiplies."""
    plain = epilogue.bias_N is None and epilogue.residual_TN is None
    return kind in ("dense", "fp8") and plain and (launch.config.deferred or launch.splits == 1)


def _stream(
    x_TK: Tensor, weight_NK: Tensor, scales: tuple[Tensor, Tensor], kind: str, y: Tensor, launch: WideLaunch,
    grid: tuple[int, int, int],
) -> None:  # fmt: skip
    """Multiply by the warp-specialised kernel; `y` gets outputs, or partial sums."""
    # Gluon is needed here alone: where there is no such GPU its kernels are not even read.
    from slipstream.kernels.triton.gemm.wide_streams import stream_kernel

    config, (first, second) = launch.config, launch.pieces
    silu = y.shape[-1] != weight_NK.shape[0]
    # Two programs of four multiplying warps share a processor's registers.
    few = {"maxnreg": 128} if config.num_warps == 4 else {}
    stream_kernel[grid](
        *(tma_boxes(x_TK, count, config.block_k) for count in (first, second or 16)),
        tma_boxes(weight_NK, config.block_n, config.block_k), *scales, y,
        x_TK.shape[0], weight_NK.shape[0], launch.split_columns // config.block_k, y.stride(-2), y.stride(0),
        FIRST=first, SECOND=second, BLOCK_N=config.block_n, PAIR=config.pair, BLOCK_K=config.block_k,
        STAGES=config.num_stages, DEFERRED=config.deferred, FP8=kind == "fp8", SILU=silu, AT_ONCE=config.at_once,
        WAITS_FIRST=launch.waits_first, PDL=launch.dependent, num_warps=config.num_warps, **few,
        **launch_options(launch.dependent),
    )  # fmt: skip


def _fits_copy_engine(x_TK: Tensor) -> bool:
    """Tell whether rows start where TMA can read: at multiples of 16 bytes."""
    return x_TK.data_ptr() % 16 == 0 and x_TK.stride(0) * x_TK.element_size() % 16 == 0


def _tiles(x_TK: Tensor, num_rows: int, config: WideConfig, tma: bool) -> Any:  # triton has no types of its own
    if not tma:
        return x_TK
    return TensorDescriptor(x_TK, list(x_TK.shape), [x_TK.stride(0), 1], [num_rows, config.block_k])
