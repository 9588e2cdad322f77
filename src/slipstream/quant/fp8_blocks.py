"""FP8 in blocks of 128 x 128: codes and one scale a block, under the name that each writer gives the scales."""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.quant.formats.fp8 import BLOCK
from slipstream.quant.layout import FLOATS, Layout, Stored
from slipstream.quant.packed import PackedWeight


def fp8_blocks(scales: str) -> Layout:
    """Return the layout with this suffix of scales: DeepSeek's `weight_scale_inv`, llm-compressor's `weight_scale`."""

    def tensors(rows: int, columns: int) -> dict[str, Stored]:
        return {
            "weight": Stored((rows, columns), (torch.float8_e4m3fn,)),
            scales: Stored((-(-rows // BLOCK), -(-columns // BLOCK)), FLOATS, rows_axis=None),
        }

    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        # By row, so that weights of any height can be joined; one float32 per 128 columns.
        scale = tensors[scales].float().repeat_interleave(BLOCK, dim=0)[:rows].contiguous()
        return PackedWeight("fp8_block", rows, columns, tensors["weight"], {"scale": scale})

    return Layout("fp8_block", tensors, _refuse_store, pack)


def _refuse_store(packed: PackedWeight) -> dict[str, Tensor]:
    raise AssertionError("FP8 blocks are read, never written")
