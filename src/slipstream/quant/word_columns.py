"""AWQ's and GPTQ's INT4 as they are stored: words of eight codes, inputs first, with a zero point for each group.

Both store a layer [in, out]: AWQ packs eight outputs into a word, in the order 0 2 4 6 1 3 5 7; GPTQ eight inputs in
order, and zero points less one (but for its second format). weight = (code - zero) * scale of its group of inputs.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.checkpoint.fields import Fields
from slipstream.errors import CheckpointError
from slipstream.quant.formats.nibbles import pack_nibbles
from slipstream.quant.layout import FLOATS, Layout, Stored
from slipstream.quant.packed import PackedWeight

_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIDDLE = 8  # the zero point of codes that are symmetric


def awq_layout(fields: Fields) -> Layout:
    """Return the stored form of AWQ's layers."""
    _check(fields, {"bits": 4, "zero_point": True, "version": "gemm"})
    return _layout("awq", fields.integer("group_size"), symmetric=False, zero_offset=0)


def gptq_layout(fields: Fields) -> Layout:
    """Return the stored form of GPTQ's layers; symmetric ones become plain INT4 by group."""
    _check(fields, {"bits": 4, "desc_act": False})
    second = fields.text("checkpoint_format", "gptq") == "gptq_v2"
    symmetric = fields.flag("sym", True)
    return _layout("gptq", fields.integer("group_size"), symmetric, zero_offset=0 if second else 1)


def _check(fields: Fields, expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        given = fields.values.get(key, value)
        given = given.lower() if isinstance(given, str) else given
        if given != value:
            raise fields.error(key, f"is {given!r}; slipstream reads AWQ and GPTQ with {value!r}.")


def _layout(kind: Literal["awq", "gptq"], group_size: int, symmetric: bool, zero_offset: int) -> Layout:
    format = "int4_group" if symmetric else "int4_zero"

    def tensors(rows: int, columns: int) -> dict[str, Stored]:
        groups = -(-columns // group_size)
        words = (columns, rows // _WORD) if kind == "awq" else (columns // _WORD, rows)
        return {
            "qweight": Stored(words, (torch.int32,), rows_axis=1, rows_per_entry=_WORD if kind == "awq" else 1),
            "qzeros": Stored((groups, rows // _WORD), (torch.int32,), rows_axis=1, rows_per_entry=_WORD),
            "scales": Stored((groups, rows), FLOATS, rows_axis=1),
            **({"g_idx": Stored((columns,), (torch.int32,), None, required=False)} if kind == "gptq" else {}),
        }

    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        order = _AWQ_ORDER if kind == "awq" else tuple(range(_WORD))
        codes_IO = _spread(tensors["qweight"], 1, order) if kind == "awq" else _spread(tensors["qweight"], 0, order)
        zero_GO = _spread(tensors["qzeros"], 1, order) + zero_offset
        scale_OG = tensors["scales"].float().t().contiguous()
        index_I = torch.arange(columns) // group_size
        if "g_idx" in tensors and not torch.equal(tensors["g_idx"].long(), index_I):
            raise CheckpointError(
                "g_idx puts inputs into groups out of order (desc_act), which slipstream cannot read."
            )
        codes_OI = codes_IO.t()
        if not symmetric:
            zeros = {"scale": scale_OG, "zero": zero_GO.t().float().contiguous()}
            return PackedWeight(format, rows, columns, pack_nibbles(codes_OI.to(torch.int8).contiguous()), zeros)
        if not bool((zero_GO == _MIDDLE).all()):
            raise CheckpointError("its zero points are not all 8, though quantization_config says 'sym'.")
        signed_OI = (codes_OI - _MIDDLE).to(torch.int8).contiguous()
        return PackedWeight(format, rows, columns, pack_nibbles(signed_OI), {"scale": scale_OG})

    return Layout(format, tensors, _refuse_store, pack, row_multiple=_WORD, column_multiple=group_size)


def _spread(words: Tensor, axis: int, order: tuple[int, ...]) -> Tensor:
    """Return the eight codes of each word along an axis, int32: nibble k is entry order[k]."""
    nibbles = [(words >> (4 * order.index(entry))) & 15 for entry in range(_WORD)]
    stacked = torch.stack(nibbles, dim=axis + 1)
    return stacked.flatten(axis, axis + 1)


def _refuse_store(packed: PackedWeight) -> dict[str, Tensor]:
    raise AssertionError("AWQ and GPTQ are read, never written")
