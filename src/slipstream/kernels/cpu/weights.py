"""Weights in the layout the CPU kernels read: panels of 16 rows, made once when a model is loaded."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import KernelError
from slipstream.kernels.cpu.library import FORMATS, NativeEngine, NativeLinear, check
from slipstream.quant.gguf_blocks import BLOCK_FORMATS
from slipstream.quant.packed import PackedWeight

SUFFIX = "/cpu"
PANEL_FORMATS = (*BLOCK_FORMATS, "w8a8_int8", "w4a8")
PANEL = 16
_DENSE = {torch.float32: FORMATS["f32"], torch.bfloat16: FORMATS["bf16"], torch.float16: FORMATS["f16"]}
_MAX_INTEGER_COLUMNS = 65536
"""Beyond this, a sum of 255 x 127 over a row could leave 32 bits."""


def to_panels(weight: PackedWeight, engine: NativeEngine) -> PackedWeight:
    """Return the weight as panels of 16 rows, in a format named with "/cpu".

    The bytes stay as many, except that scales and minima of Q4_K and Q5_K, six bits each, become bytes: 4 more for 256
    weights. The result belongs to the CPU kernels only: its `codes` are [panels, bytes of a panel], and it cannot be
    joined.
    """
    blocks = BLOCK_FORMATS.get(weight.format)
    if blocks is not None and weight.in_features % blocks.columns:
        raise KernelError(
            f"A {weight.format} weight has {weight.in_features} columns, not a multiple of {blocks.columns}."
        )
    if blocks is None and weight.in_features > _MAX_INTEGER_COLUMNS:
        raise KernelError(f"A {weight.format} weight has {weight.in_features} columns; {_MAX_INTEGER_COLUMNS} fit.")
    rows = weight.codes.contiguous()
    panels = -(-weight.out_features // PANEL)
    size = engine.library.slip_panel_bytes(FORMATS[weight.format], weight.out_features, weight.in_features)
    codes = engine.arena.take(size).view(panels, -1) if size else torch.empty((panels, 0), dtype=torch.uint8)
    check(
        engine.library.slip_repack(
            engine.handle,
            FORMATS[weight.format],
            rows.data_ptr(),
            rows.stride(0) * rows.element_size(),
            weight.out_features,
            weight.in_features,
            codes.data_ptr(),
        )
    )
    scales = {} if blocks is not None else {"scale": _padded_rows(weight, panels)}
    return PackedWeight(weight.format + SUFFIX, weight.out_features, weight.in_features, codes, scales)


def rows_of_panels(weight: PackedWeight, row_ids_T: Tensor, engine: NativeEngine) -> Tensor:
    """Return rows of a weight that `to_panels` made as float32 numbers."""
    ids_T = row_ids_T.to(torch.int64).contiguous()
    out_TD = torch.empty((*ids_T.shape, weight.in_features))
    check(
        engine.library.slip_gather_rows(
            FORMATS[weight.format.removesuffix(SUFFIX)],
            weight.codes.data_ptr(),
            weight.out_features,
            weight.in_features,
            ids_T.data_ptr(),
            ids_T.numel(),
            out_TD.data_ptr(),
        )
    )
    scale = weight.scales.get("scale")
    return out_TD if scale is None else out_TD * scale[ids_T][..., None]


def describe_panels(weight: PackedWeight, bias_N: Tensor | None) -> NativeLinear:
    """Point at a weight that `to_panels` made. The weight and the bias must outlive the description."""
    scale = weight.scales.get("scale")
    return NativeLinear(
        weight.codes.data_ptr(),
        None if scale is None else scale.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        None,
        FORMATS[weight.format.removesuffix(SUFFIX)],
        weight.out_features,
        weight.in_features,
    )


def describe_linear(linear: Any, kept: list[object]) -> NativeLinear:
    """Point at a layer's weight and bias; what must live as long as the description is added to `kept`."""
    bias_N = None if linear.bias is None else linear.bias.detach().float().contiguous()
    kept.append(bias_N)
    if linear.weight is not None:
        kept.append(linear.weight.detach())
        return describe_dense(linear.weight.detach(), bias_N)
    kept.append(linear.packed)
    row = linear.packed.out_features
    following: NativeLinear | None = None
    for run in reversed(linear.packed.runs):
        row -= run.out_features
        native = describe_panels(run, None if bias_N is None else bias_N[row:])
        if following is not None:
            native.rest = ctypes.addressof(following)
        kept.append(native)
        following = native
    assert following is not None, "a weight has rows"
    return following


def weight_address(part: Any) -> int:
    """Return where a layer's or a table's numbers lie: it changes when they are replaced as a whole."""
    address: int = part.weight.data_ptr() if part.weight is not None else part.packed.runs[0].codes.data_ptr()
    return address


def is_dense(weight_ND: Tensor) -> bool:
    """Tell whether the kernels can read this weight as it is."""
    return weight_ND.dtype in _DENSE and weight_ND.is_contiguous()


def dense_format(weight_ND: Tensor) -> int:
    """Return the library's number of a dense weight's type."""
    return _DENSE[weight_ND.dtype]


def describe_dense(weight_ND: Tensor, bias_N: Tensor | None) -> NativeLinear:
    """Point at a dense weight. The weight and the bias must outlive the description."""
    return NativeLinear(
        weight_ND.data_ptr(),
        None,
        None if bias_N is None else bias_N.data_ptr(),
        None,
        dense_format(weight_ND),
        weight_ND.shape[0],
        weight_ND.shape[1],
    )


def _padded_rows(weight: PackedWeight, panels: int) -> Tensor:
    scale_N = weight.scales["scale"].float().reshape(-1)
    if scale_N.numel() == 1:
        scale_N = scale_N.expand(weight.out_features)
    return torch.nn.functional.pad(scale_N, (0, PANEL * panels - weight.out_features)).contiguous()
