"""Products with every kind of weight: how it is prepared, what rows it wants, and which kernel multiplies."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.triton.gemm import hopper_ws_launch, int4, quantize
from slipstream.kernels.triton.gemm.hopper_ws_launch import SplitOrder, multiply_ws
from slipstream.kernels.triton.gemm.quantize import Codes
from slipstream.kernels.triton.gemm.small_m_launch import MOST_ROWS, MOST_WHOLE_ROWS, multiply_small_m, rope_fits
from slipstream.kernels.triton.gemm.split_k import Epilogue, Launch, Rows, multiply, token_tile
from slipstream.kernels.triton.gemm.split_k_reduce import PartialSums
from slipstream.kernels.triton.gemm.wide_linear import WideLaunch, fitted, multiply_wide, row_pieces, stream_config
from slipstream.kernels.triton.norm import SQUARED
from slipstream.kernels.triton.rope import RopeWrite
from slipstream.kernels.triton.tuning import (
    CHAIN_ROWS,
    MOST_WIDE_ROWS,
    LinearConfig,
    Tuning,
    WideConfig,
    has_fp8,
)
from slipstream.quant.packed import PackedWeight
from slipstream.quant.scheme import by_row

SUFFIX = "/triton"
"""Ends the format of a weight that was prepared for these kernels."""
_FP8 = ("fp8_per_channel", "fp8_per_tensor")
_INPUTS: dict[str, Codes | None] = {
    "fp8_per_channel": "fp8",
    "fp8_per_tensor": "fp8",
    "w8a8_int8": "int8",
    "w4a8": "int8",
    "int4_per_channel": None,
    "int4_group": None,
    "int4_fp8": None,
    "mxfp4": None,
    "mxfp4_act": None,
}
"""Formats these kernels multiply, and the codes their rows are turned into; see `_widened_rows` for the others."""
_NIBBLES = ("w4a8", "int4_per_channel", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act")
_NEED_FP8 = (*_FP8, "int4_fp8")
_GROUPED = ("int4_group", "mxfp4", "mxfp4_act")
_DENSE = (torch.bfloat16, torch.float16, torch.float32)
_SERIAL_ABOVE = 256  # rows; from here on tiles fill the device without more programs to a tile

_CACHED = 4096  # launches that are looked up again and not worked out
Weight = Tensor | PackedWeight


class WeightShape(NamedTuple):
    """What tiles depend on: the format, outputs, inputs, and the bytes of a number."""

    format: str
    outputs: int
    inputs: int
    itemsize: float

    @property
    def key(self) -> str:
        """The name under which a configuration has tiles."""
        return f"{self.format}:{self.outputs}:{self.inputs}"


class Products:
    """Multiplies rows by weights on one device, one stream at a time: programs of a product share its counters."""

    def __init__(self, tuning: Tuning, device: torch.device) -> None:
        self._tuning = tuning
        self.counters = torch.zeros(1 << 18, dtype=torch.int32, device=device)
        self.dependent = tuning.dependent_launch
        self.add_warps = tuning.add_warps
        # A decoding pass multiplies by few shapes, over and over; what follows from a shape is worked out once.
        self._narrow = lru_cache(_CACHED)(self._make_narrow)
        self._is_small_m = lru_cache(_CACHED)(self._find_small_m)
        self._launch = lru_cache(_CACHED)(self._make_launch)
        self._wide_launch = lru_cache(_CACHED)(self._make_wide_launch)

    def prepare(self, weight: PackedWeight) -> PackedWeight:
        """Return the weight in the layout the kernels read, or as it is if they do not know its format."""
        if weight.format not in _INPUTS or (weight.format in _NEED_FP8 and not has_fp8(self._tuning.architecture)):
            return weight
        scales = dict(weight.scales)
        codes = weight.codes.contiguous()
        half = _half(weight) if weight.format in _NIBBLES else 0
        if weight.format in _GROUPED:
            scales["scale"] = scales["scale"].contiguous()
        else:
            scales["scale"] = by_row(scales["scale"], weight).float().contiguous()
        if weight.format == "int4_fp8":
            scales["scale"] = scales["scale"] * scales.pop("scale_2")
        if half is None:
            return weight
        if half:
            codes = int4.pack_halves(codes, half)
        if "input_scale" in scales:
            scales["input_scale"] = scales["input_scale"].float().max().reshape(1)
        return replace(weight, format=weight.format + SUFFIX, codes=codes, scales=scales)

    def knows(self, weight: Weight) -> bool:
        """Tell whether these kernels multiply by the weight as it is."""
        if isinstance(weight, PackedWeight):
            return weight.format.endswith(SUFFIX)
        return weight.dtype in _DENSE and weight.stride(1) == 1 and weight.stride(0) == weight.shape[1]

    def wants(self, weight: Weight) -> Codes | None:
        """Return the codes a weight's rows are turned into, with a scale each; None where `rows_for` makes the rows."""
        if not isinstance(weight, PackedWeight):
            return None
        return _INPUTS[weight.format.removesuffix(SUFFIX)] if "input_scale" not in weight.scales else None

    def rows_for(self, weight: Weight, x_TK: Tensor) -> Rows:
        """Return rows as a weight's product takes them."""
        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        if isinstance(weight, PackedWeight):
            codes = _INPUTS[weight.format.removesuffix(SUFFIX)]
            if codes is not None:
                static = weight.scales.get("input_scale")
                return Rows(*quantize.quantize_rows(x_TK, codes, static, self.dependent), x_TK.dtype)
            return self._widened_rows(weight.format.removesuffix(SUFFIX), x_TK)
        return Rows(x_TK, None, x_TK.dtype)

    def _widened_rows(self, format: str, x_TK: Tensor) -> Rows:
        """Return rows rounded as a format's inputs are, in bfloat16, which holds them exactly; or as they are."""
        if format == "int4_fp8":
            rows = quantize.quantize_rows(x_TK, "fp8", None, self.dependent, torch.bfloat16)
            return Rows(*rows, x_TK.dtype)
        return Rows(quantize.round_rows(x_TK, self.dependent) if format == "mxfp4_act" else x_TK, None, x_TK.dtype)

    def multiply(self, rows: Rows, weight: Weight, epilogue: Epilogue) -> Tensor:
        """Return rows times the weight."""
        if not isinstance(weight, PackedWeight):
            return self._multiply_codes(rows, weight, None, "dense", epilogue)
        format = weight.format.removesuffix(SUFFIX)
        scale = weight.scales["scale"]
        if format in _NIBBLES:
            half = _half(weight)
            assert half is not None, "only weights whose columns fit are prepared"
            launch = self._launch(shape_of_weight(weight), rows.values_TK.shape[0])
            return int4.multiply_nibbles(
                rows.values_TK, (weight.codes, scale), half, rows.scale_T, epilogue, launch, rows.dtype
            )
        kind = "int8" if format == "w8a8_int8" else "fp8" if self._tuning.fp8_dot else "fp8_upcast"
        return self._multiply_codes(rows, weight.codes, scale, kind, epilogue)

    def _multiply_codes(
        self, rows: Rows, weight_NK: Tensor, scale_N: Tensor | None, kind: str, epilogue: Epilogue
    ) -> Tensor:
        """Multiply by a weight that keeps one number to a code: few rows, many, or as many as there may be."""
        shape, num_rows = _shape_of(weight_NK, kind), rows.values_TK.shape[0]
        if self._is_small_m(shape, num_rows):
            return multiply_small_m(rows, weight_NK, scale_N, kind, epilogue, self._launch(shape, num_rows))
        scales = None
        if scale_N is not None:
            assert rows.scale_T is not None, "codes come with their scales"
            scales = (rows.scale_T, scale_N)
        if self._tuning.architecture == "sm_90" and num_rows >= hopper_ws_launch.LEAST_ROWS:
            config = self._narrow(shape)
            if hopper_ws_launch.fits(rows.values_TK, weight_NK, kind, config):
                columns = shape.inputs if config.split_k == 1 else _split_columns(config, shape)
                order = SplitOrder(config.split_k, columns)
                return multiply_ws(rows.values_TK, weight_NK, scales, epilogue, order, rows.dtype, self.dependent)
        wide = self._wide_launch(shape, kind, num_rows, epilogue.silu)
        if wide is None:
            launch = self._launch(shape, num_rows)
            return multiply(rows.values_TK, weight_NK, scales, kind, epilogue, launch, rows.dtype)
        wide = replace(wide, config=replace(wide.config, deferred=False))
        return multiply_wide(rows.values_TK, weight_NK, scales, kind, epilogue, wide, rows.dtype)

    def deferred_sums(self, rows: Rows, weight: Weight, *, waited: bool = False) -> PartialSums | None:
        """Return the float32 sums of each split of K [S, T, N], if they are left to the kernel that follows.

        It then adds them in their order and rounds (`split_k_reduce`). None: `multiply` does.

        Args:
            waited: see `PartialSums`.
        """
        num_rows = rows.values_TK.shape[0]
        if self._is_small_m(shape_of_weight(weight), num_rows):
            return None
        if not isinstance(weight, PackedWeight):
            kind, weight_NK, scales = "dense", weight, None
        elif weight.format.removesuffix(SUFFIX) in _FP8 and rows.scale_T is not None:
            kind, weight_NK = "fp8" if self._tuning.fp8_dot else "fp8_upcast", weight.codes
            scales = (rows.scale_T, weight.scales["scale"])
        else:
            return None
        launch = self._wide_launch(_shape_of(weight_NK, kind), kind, num_rows, False)
        if launch is None or not launch.config.deferred:
            return None
        launch = replace(launch, waits_first=waited)
        parts_STN = multiply_wide(rows.values_TK, weight_NK, None, kind, Epilogue(), launch, rows.dtype)
        return PartialSums(parts_STN, scales, waited)

    def _make_wide_launch(self, shape: WeightShape, kind: str, num_rows: int, silu: bool) -> WideLaunch | None:
        """Return how one program takes all rows, if it does; `deferred` stands only where there is something to add."""
        narrow, wide = self._narrow(shape), self._wide_config(shape, num_rows, silu)
        if wide is None:
            return None
        pieces = row_pieces(num_rows)
        wide = fitted(wide, pieces, kind, silu, self._tuning.shared_bytes)
        wide = replace(wide, deferred=wide.deferred and narrow.split_k > 1)
        return WideLaunch(
            wide, pieces, narrow.split_k, _split_columns(narrow, shape), self.counters, self.dependent,
            self._tuning.instruction,
        )  # fmt: skip

    def folds_norm(self, weight: Weight, num_rows: int) -> bool:
        """Tell whether a product can apply the norm before it, in a pass of so many rows."""
        most = self._tuning.fold_rows
        if isinstance(weight, PackedWeight):
            most = min(self._tuning.fold_norm_codes, MOST_WHOLE_ROWS) if self.wants(weight) == "fp8" else 0
        return num_rows <= most and self._is_small_m(shape_of_weight(weight), num_rows)

    def makes_codes(self, weight: Weight, num_rows: int) -> bool:
        """Tell whether a product can make codes of its rows, given the largest magnitudes of their parts."""
        few = num_rows <= self._tuning.fold_codes and self._is_small_m(shape_of_weight(weight), num_rows)
        return few and self.wants(weight) == "fp8"

    def num_maxima(self, weight: Weight, num_rows: int) -> int:
        """Return how many largest magnitudes a product of SiLUs can leave of a row; 0 if it leaves none."""
        shape = shape_of_weight(weight)
        if shape.format in _NIBBLES or not self._is_small_m(shape, num_rows):
            return 0
        return self._launch(shape, num_rows).grid(num_rows, shape.outputs, silu=True)[1]

    def squared(self, weight: Weight, num_rows: int) -> int:
        """Return of how many outputs a product can leave the sum of squares for the norm after it; 0: it leaves none.

        Sums are added in pairs, so that those of fewer outputs are part of those of 64.
        """
        shape = shape_of_weight(weight)
        if shape.format in _NIBBLES or not self._is_small_m(shape, num_rows):
            return 0
        taken = self._launch(shape, num_rows).config.outputs
        return min(taken, SQUARED) if taken % SQUARED == 0 or SQUARED % taken == 0 else 0

    def folds_rope(self, weight: Weight, num_rows: int, dtype: torch.dtype, write: RopeWrite) -> bool:
        """Tell whether a product of queries, keys and values can rotate and write them itself."""
        shape = shape_of_weight(weight)
        if shape.format in _NIBBLES or num_rows > self._tuning.fold_rows or not self._is_small_m(shape, num_rows):
            return False
        return rope_fits(write, dtype)

    def _find_small_m(self, shape: WeightShape, num_rows: int) -> bool:
        """Tell whether `small_m` multiplies so few rows; not if the weight has tiles with which a program takes all."""
        if not self._tuning.weights_first or num_rows > MOST_ROWS:
            return False
        return self._wide_config(shape, num_rows, silu=False) is None

    def _wide_config(self, shape: WeightShape, num_rows: int, silu: bool) -> WideConfig | None:
        """Return the tiles with which one program takes all rows: a configuration's, or by arithmetic."""
        if num_rows > MOST_WIDE_ROWS or shape.itemsize > 2:
            return None
        tuning, narrow = self._tuning, self._narrow(shape)
        config = (
            tuning.wide_linear_config(shape.key, num_rows)
            or stream_config(shape.format, (shape.outputs, shape.inputs), num_rows, silu, narrow, tuning)
            or tuning.wide_format_config(shape.format, num_rows, shape.outputs, narrow)
        )
        return None if config is None else replace(config, block_k=min(config.block_k, narrow.block_k))

    def _make_narrow(self, shape: WeightShape) -> LinearConfig:
        """Return the configuration that fixes the order of a weight's columns."""
        return self._tuning.linear_config(*shape)

    def _tuned(self, key: str, config: LinearConfig, num_rows: int) -> LinearConfig:
        """Return the tiles of passes of so many rows, in the order of columns of the configuration given."""
        if num_rows > MOST_ROWS:
            return self._tuning.many_config(key, config)
        return self._tuning.few_config(key, config) if num_rows <= CHAIN_ROWS else config

    def _make_launch(self, shape: WeightShape, num_rows: int) -> Launch:
        format, num_outputs, num_inputs, itemsize = shape
        config = self._narrow(shape)
        columns = _split_columns(config, shape)
        serial = num_rows > _SERIAL_ABOVE or config.split_k == 1
        wide = self._tuning.wide_config(format, config)
        num_tiles = -(-num_outputs // wide.block_n)
        if num_rows > 64 and num_tiles * -(-num_rows // 128) * config.split_k * 4 >= self._tuning.programs:
            fills = num_tiles * 2 >= self._tuning.programs and wide.num_warps >= 8 and wide.split_k == 1
            config, tile = wide, _wide_tile(num_rows, format, itemsize, fills)
        else:
            config = self._tuned(shape.key, config, num_rows)
            tile = token_tile(num_rows)
        small_m = self._is_small_m(shape, num_rows)
        if format == "fp8" and not small_m:
            config = replace(config, block_k=min(config.block_k, 128))  # wider tiles would make sums whole elsewhere
        fits = config.split_k > 1 and num_rows * config.split_k <= tile and num_inputs == columns * config.split_k
        if not small_m or (config.sliced_k and not fits):
            config = replace(config, program_n=0, sliced_k=False, gemv_stages=0)
        config = self._tuning.fitted(config, tile, itemsize, staged_rows=not small_m)
        return Launch(config, tile, columns, serial, self.counters, self.dependent, self._tuning.instruction)


def _split_columns(config: LinearConfig, shape: WeightShape) -> int:
    """Return the columns of one split of K."""
    return -(-shape.inputs // (config.block_k * config.split_k)) * config.block_k


def _shape_of(weight_NK: Tensor, kind: str) -> WeightShape:
    num_outputs, num_inputs = weight_NK.shape
    return WeightShape(kind.removesuffix("_upcast"), num_outputs, num_inputs, weight_NK.element_size())


def shape_of_weight(weight: Weight) -> WeightShape:
    """Return what a weight's tiles depend on."""
    if not isinstance(weight, PackedWeight):
        return _shape_of(weight, "dense")
    format = weight.format.removesuffix(SUFFIX)
    name = "int8" if format == "w8a8_int8" else "fp8" if format in _FP8 else format
    return WeightShape(name, weight.out_features, weight.in_features, 0.5 if format in _NIBBLES else 1)


def _wide_tile(num_rows: int, format: str, itemsize: float, fills: bool) -> int:
    """Return the width of a token tile; weights are read once for each: 256 are one if it `fills` the device."""
    if itemsize == 0.5:
        return 64  # wider tiles leave no registers for both halves of a block
    # FP8 keeps two sums of every tile, and float32 is multiplied in registers: 256 tokens leave none.
    return 256 if fills and 128 < num_rows <= _SERIAL_ABOVE and format != "fp8" and itemsize <= 2 else 128


def _half(weight: PackedWeight) -> int | None:
    """Return the columns of half a block of nibbles, None if the columns do not come out even."""
    scale = weight.scales["scale"]
    grouped = weight.format.removesuffix(SUFFIX) in _GROUPED
    return int4.half_block(weight.in_features, weight.in_features // scale.shape[1] if grouped else None)
