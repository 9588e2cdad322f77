"""Products with GGUF blocks: activations in int8 per block of 32, whole numbers inside a block, float32 across blocks.

Shape letters: T tokens, B blocks of a row, N outputs.
"""

import torch
from torch import Tensor

from slipstream.quant.gguf_blocks import BLOCK, dequantize, split_blocks
from slipstream.quant.packed import PackedWeight


def gguf_linear(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply by a weight in GGUF blocks.

    An activation block's scale is its largest magnitude / 127 and its codes are x / scale, rounded half to even. Each
    block of 32 (those of the K formats have the scales of their 16 or 32 weights multiplied in by `split_blocks`) adds
    (sum of code products) * (weight scale * activation scale), and, where the format has a minimum, minimum *
    (activation scale * sum of activation codes), blocks from first to last.
    """
    blocks = split_blocks(weight.format, weight.codes)
    x_TB32 = x_TD.float().reshape(-1, weight.in_features // BLOCK, BLOCK)
    scale_TB = x_TB32.abs().amax(-1) / 127
    codes_TB32 = torch.where(scale_TB[..., None] > 0, torch.round(x_TB32 / scale_TB[..., None]), 0.0)
    sums_TBN = torch.einsum("tbk,nbk->tbn", codes_TB32, blocks.codes_NB32.float())  # whole and below 2^24, so exact
    y_TBN = sums_TBN * (blocks.scale_NB.T[None] * scale_TB[..., None])
    if blocks.minimum_NB is not None:
        y_TBN = y_TBN + blocks.minimum_NB.T[None] * (scale_TB * codes_TB32.sum(-1))[..., None]
    return y_TBN.sum(1).reshape(*x_TD.shape[:-1], weight.out_features).to(x_TD.dtype)


def gguf_rows(weight: PackedWeight, row_ids_T: Tensor) -> Tensor:
    """Return rows of a table in GGUF blocks as float32 numbers."""
    rows_TD = dequantize(weight.format, weight.codes[row_ids_T.reshape(-1)])
    return rows_TD.reshape(*row_ids_T.shape, weight.in_features)
