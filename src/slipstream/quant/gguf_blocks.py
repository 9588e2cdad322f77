"""GGUF's block formats as stored: blocks of 32 weights of a row, each with its own half-precision scale.

A block of Q8_0 is d (float16) and 32 int8 codes: weight = d * code. Q4_0 is d and 16 bytes, weights 0..15 in the low
halves and 16..31 in the high ones: weight = d * (code - 8). Q4_1 is d, m and 16 bytes: weight = d * code + m.

Shape letters: N rows, B blocks of a row, K = 32 B columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import CheckpointError

BLOCK = 32
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}


@dataclass(frozen=True)
class Blocks:
    """A weight taken apart: weight = scale * code + minimum."""

    codes_NB32: Tensor
    scale_NB: Tensor
    minimum_NB: Tensor | None


def split_blocks(format: str, rows_NC: Tensor) -> Blocks:
    """Take rows of bytes apart; codes are int32, signed where the format centres them."""
    size = BLOCK_BYTES[format]
    if rows_NC.dtype != torch.uint8 or rows_NC.shape[-1] % size:
        raise CheckpointError(
            f"A {format} weight is rows of uint8 in blocks of {size} bytes; these are {rows_NC.dtype} rows of "
            f"{rows_NC.shape[-1]}."
        )
    blocks_NBC = rows_NC.contiguous().view(*rows_NC.shape[:-1], -1, size)
    scale_NB = _halves(blocks_NBC[..., :2])
    if format == "q8_0":
        return Blocks(blocks_NBC[..., 2:].contiguous().view(torch.int8).int(), scale_NB, None)
    minimum_NB = _halves(blocks_NBC[..., 2:4]) if format == "q4_1" else None
    packed_NB16 = blocks_NBC[..., -16:].int()
    codes_NB32 = torch.cat([packed_NB16 & 15, packed_NB16 >> 4], dim=-1)
    return Blocks(codes_NB32 if format == "q4_1" else codes_NB32 - 8, scale_NB, minimum_NB)


def dequantize(format: str, rows_NC: Tensor) -> Tensor:
    """Return the float32 weight [N, K] that rows of bytes stand for."""
    blocks = split_blocks(format, rows_NC)
    weight_NB32 = blocks.codes_NB32 * blocks.scale_NB[..., None]
    if blocks.minimum_NB is not None:
        weight_NB32 = weight_NB32 + blocks.minimum_NB[..., None]
    return weight_NB32.flatten(-2)


def _halves(bytes_NB2: Tensor) -> Tensor:
    return bytes_NB2.contiguous().view(torch.float16).squeeze(-1).float()
