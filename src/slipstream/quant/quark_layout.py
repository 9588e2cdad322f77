"""Quark's stored forms: what its loaders, and vLLM's and SGLang's, look for beside each layer's name."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.quant.formats.nibbles import from_words, pack_nibbles, to_words, unpack_signed
from slipstream.quant.layout import FLOATS, Layout, Stored, refuse_zero_points
from slipstream.quant.packed import PackedWeight

WORD = 8  # 4-bit codes in an int32


def quark_layout(
    format: str,
    group_size: int | None,
    reorder: bool,
    scale_dtype: torch.dtype = torch.bfloat16,
    file_to_file: bool = False,
) -> Layout:
    """Return the layout of a packed format.

    Args:
        scale_dtype: what group scales are written as: the model's dtype, since readers hold them in it.
        reorder: the nibble order of INT4 words ("reorder" or "order" in Quark's export.pack_method).
        file_to_file: the per-group INT4 that Quark's file-to-file pass leaves, whose scales are not transposed.
    """
    if format == "int4_group":
        assert group_size is not None
        return _int4_grouped(group_size, reorder, scale_dtype, file_to_file)
    if format in ("int4_per_channel", "w4a8"):
        return _int4_rows(format, reorder)
    simple: dict[str, Callable[[], Layout]] = {
        "fp8_per_channel": _fp8_rows,
        "fp8_per_tensor": _fp8_tensor,
        "w8a8_int8": _int8_rows,
        "int4_fp8": lambda: _int4_two_scale(reorder),
        "mxfp4": lambda: _mxfp4("mxfp4"),
        "mxfp4_act": lambda: _mxfp4("mxfp4_act"),
    }
    if format not in simple:
        raise ConfigError(f"Quark's dialect has no form for {format!r}.")
    return simple[format]()


def _fp8_rows() -> Layout:
    return Layout(
        "fp8_per_channel",
        lambda rows, columns: {
            "weight": Stored((rows, columns), (torch.float8_e4m3fn,)),
            "weight_scale": Stored((rows,), FLOATS),
        },
        lambda packed: {"weight": packed.codes, "weight_scale": packed.scales["scale"]},
        lambda tensors, rows, columns: PackedWeight(
            "fp8_per_channel", rows, columns, tensors["weight"], {"scale": _rows(tensors["weight_scale"])}
        ),
    )


def _fp8_tensor() -> Layout:
    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        scales = {"scale": tensors["weight_scale"].float().reshape(())}
        if "input_scale" in tensors:
            scales["input_scale"] = tensors["input_scale"].float().reshape(())
        return PackedWeight("fp8_per_tensor", rows, columns, tensors["weight"], scales)

    return Layout(
        "fp8_per_tensor",
        lambda rows, columns: {
            "weight": Stored((rows, columns), (torch.float8_e4m3fn,)),
            "weight_scale": Stored((), FLOATS, rows_axis=None),
            "input_scale": Stored((), FLOATS, rows_axis=None, required=False),
        },
        lambda packed: {"weight": packed.codes, "weight_scale": packed.scales["scale"]},
        pack,
    )


def _int8_rows() -> Layout:
    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        refuse_zero_points(tensors)
        return PackedWeight("w8a8_int8", rows, columns, tensors["weight"], {"scale": _rows(tensors["weight_scale"])})

    return Layout(
        "w8a8_int8",
        lambda rows, columns: {
            "weight": Stored((rows, columns), (torch.int8,)),
            "weight_scale": Stored((rows,), FLOATS),
            "weight_zero_point": Stored((rows,), (torch.int8,), required=False),
        },
        lambda packed: {
            "weight": packed.codes,
            "weight_scale": packed.scales["scale"],
            "weight_zero_point": torch.zeros(packed.out_features, dtype=torch.int8),
        },
        pack,
    )


def _int4_rows(format: str, reorder: bool) -> Layout:
    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        refuse_zero_points(tensors)
        codes = from_words(tensors["weight"], reorder)
        return PackedWeight(format, rows, columns, codes, {"scale": _rows(tensors["weight_scale"])})

    return Layout(
        format,
        lambda rows, columns: {
            "weight": Stored((rows, columns // WORD), (torch.int32,)),
            "weight_scale": Stored((rows,), FLOATS),
            "weight_zero_point": Stored((-(-rows // WORD),), (torch.int32,), rows_per_entry=WORD, required=False),
        },
        lambda packed: {
            "weight": to_words(packed.codes, reorder),
            "weight_scale": packed.scales["scale"],
            "weight_zero_point": torch.zeros(-(-packed.out_features // WORD), dtype=torch.int32),
        },
        pack,
        column_multiple=WORD,
    )


def _int4_grouped(group_size: int, reorder: bool, scale_dtype: torch.dtype, file_to_file: bool) -> Layout:
    """Return the form whose words run along the rows: weight [in, out / 8], scales [in / group, out]."""

    def tensors(rows: int, columns: int) -> dict[str, Stored]:
        words, groups = rows // WORD, columns // group_size
        return {
            "weight": Stored((columns, words), (torch.int32,), rows_axis=1, rows_per_entry=WORD),
            "weight_scale": Stored(
                (rows, groups) if file_to_file else (groups, rows), (scale_dtype, *FLOATS), rows_axis=1
            ),
            "weight_zero_point": Stored(
                (groups, words), (torch.int32,), rows_axis=1, rows_per_entry=WORD, required=False
            ),
        }

    def store(packed: PackedWeight) -> dict[str, Tensor]:
        codes_IO = unpack_signed(packed.codes).t().contiguous()
        groups = packed.in_features // group_size
        return {
            "weight": to_words(pack_nibbles(codes_IO), reorder),
            "weight_scale": packed.scales["scale"].t().contiguous(),
            "weight_zero_point": torch.zeros(groups, packed.out_features // WORD, dtype=torch.int32),
        }

    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        refuse_zero_points(tensors)
        codes_IO = unpack_signed(from_words(tensors["weight"], reorder))
        scale = tensors["weight_scale"].float()
        scale = scale.reshape(rows, -1) if file_to_file else scale.t().contiguous()
        codes = pack_nibbles(codes_IO.t().contiguous())
        return PackedWeight("int4_group", rows, columns, codes, {"scale": scale})

    return Layout("int4_group", tensors, store, pack, WORD, group_size)


def _int4_two_scale(reorder: bool) -> Layout:
    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        scales = {"scale": tensors["weight_scale"].float().reshape(()), "scale_2": _rows(tensors["weight_scale_2"])}
        return PackedWeight("int4_fp8", rows, columns, from_words(tensors["weight"], reorder), scales)

    return Layout(
        "int4_fp8",
        lambda rows, columns: {
            "weight": Stored((rows, columns // WORD), (torch.int32,)),
            "weight_scale": Stored((), FLOATS, rows_axis=None),
            "weight_scale_2": Stored((rows,), FLOATS),
        },
        lambda packed: {
            "weight": to_words(packed.codes, reorder),
            "weight_scale": packed.scales["scale"],
            "weight_scale_2": packed.scales["scale_2"],
        },
        pack,
        column_multiple=WORD,
    )


def _mxfp4(format: str) -> Layout:
    return Layout(
        format,
        lambda rows, columns: {
            "weight": Stored((rows, columns // 2), (torch.uint8,)),
            "weight_scale": Stored((rows, columns // 32), (torch.uint8,)),
        },
        lambda packed: {"weight": packed.codes, "weight_scale": packed.scales["scale"]},
        lambda tensors, rows, columns: PackedWeight(
            format, rows, columns, tensors["weight"], {"scale": tensors["weight_scale"]}
        ),
        column_multiple=32,
    )


def _rows(scale: Tensor) -> Tensor:
    return scale.float().reshape(-1)
