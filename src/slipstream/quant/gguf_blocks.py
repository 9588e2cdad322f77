"""GGUF's block formats as stored: blocks of 32 or 256 weights of a row with their own half-precision scales.

A block of Q8_0 is d (float16) and 32 int8 codes: weight = d * code. Q4_0 is d and 16 bytes, weights 0..15 in the low
halves and 16..31 in the high ones: weight = d * (code - 8). Q4_1 is d, m and 16 bytes: weight = d * code + m. Q5_0 and
Q5_1 are the same with 4 bytes of fifth bits before the 16: weight = d * (code - 16), and d * code + m.

A block of a K format has 256 weights, in 8 blocks of 32. Q4_K is d, m, 12 bytes of scales and minima in 6 bits, and 128
bytes of codes: weight = d * scale * code - m * minimum; Q5_K has 32 bytes of fifth bits before the codes. Q6_K is 128
bytes of low halves, 64 of upper two bits, 16 int8 scales for 16 weights each, and d: weight = d * scale * (code - 32).

Shape letters: N rows, S blocks as stored, B blocks of 32 weights of a row, K = 32 B columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.quant.packed import PackedWeight

BLOCK = 32


@dataclass(frozen=True)
class BlockFormat:
    """How many columns a stored block has, and how many bytes."""

    columns: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of whole blocks of so many columns."""
        return columns // self.columns * self.nbytes


BLOCK_FORMATS = {
    "q4_0": BlockFormat(32, 18),
    "q4_1": BlockFormat(32, 20),
    "q5_0": BlockFormat(32, 22),
    "q5_1": BlockFormat(32, 24),
    "q8_0": BlockFormat(32, 34),
    "q4_k": BlockFormat(256, 144),
    "q5_k": BlockFormat(256, 176),
    "q6_k": BlockFormat(256, 210),
}


@dataclass(frozen=True)
class Blocks:
    """A weight taken apart: weight = scale * code + minimum.

    Codes of Q6_K have their scale of 16 weights multiplied in: they are whole numbers within 4096.
    """

    codes_NB32: Tensor
    scale_NB: Tensor
    minimum_NB: Tensor | None


def mxfp4_of_ggml(rows_NC: Tensor, columns: int) -> PackedWeight:
    """Return GGUF's MXFP4 as everybody else stores it.

    A block is its power of two and 16 bytes, weights 0..15 in the low halves and 16..31 in the high ones; elsewhere
    neighbours share a byte, and powers of two lie apart.
    """
    blocks_NB17 = rows_NC.view(len(rows_NC), -1, 17)
    bytes_NB16 = blocks_NB17[..., 1:]
    codes_NB32 = torch.cat([bytes_NB16 & 15, bytes_NB16 >> 4], dim=-1)
    packed_NBh = codes_NB32[..., 0::2] | (codes_NB32[..., 1::2] << 4)
    scale_NB = blocks_NB17[..., 0].contiguous()
    return PackedWeight("mxfp4", len(rows_NC), columns, packed_NBh.flatten(1).contiguous(), {"scale": scale_NB})


def split_blocks(format: str, rows_NC: Tensor) -> Blocks:
    """Take rows of bytes apart; codes are int32, signed where the format centres them."""
    size = BLOCK_FORMATS[format].nbytes
    if rows_NC.dtype != torch.uint8 or rows_NC.shape[-1] % size:
        raise CheckpointError(
            f"A {format} weight is rows of uint8 in blocks of {size} bytes; these are {rows_NC.dtype} rows of "
            f"{rows_NC.shape[-1]}."
        )
    blocks_NSC = rows_NC.contiguous().view(*rows_NC.shape[:-1], -1, size)
    if format == "q6_k":
        return _split_six_bits(blocks_NSC)
    if format in ("q4_k", "q5_k"):
        return _split_super(blocks_NSC)
    scale_NB = _halves(blocks_NSC[..., :2])
    if format == "q8_0":
        return Blocks(blocks_NSC[..., 2:].contiguous().view(torch.int8).int(), scale_NB, None)
    minimum_NB = _halves(blocks_NSC[..., 2:4]) if format in ("q4_1", "q5_1") else None
    packed_NB16 = blocks_NSC[..., -16:].int()
    codes_NB32 = torch.cat([packed_NB16 & 15, packed_NB16 >> 4], dim=-1)
    if format in ("q5_0", "q5_1"):
        fifth_NB4 = blocks_NSC[..., -20:-16].int()
        codes_NB32 |= _bits(fifth_NB4[..., None], torch.arange(8), 1).flatten(-2) << 4
    if minimum_NB is None:
        codes_NB32 -= 16 if format == "q5_0" else 8
    return Blocks(codes_NB32, scale_NB, minimum_NB)


def dequantize(format: str, rows_NC: Tensor) -> Tensor:
    """Return the float32 weight [N, K] that rows of bytes stand for."""
    blocks = split_blocks(format, rows_NC)
    weight_NB32 = blocks.codes_NB32 * blocks.scale_NB[..., None]
    if blocks.minimum_NB is not None:
        weight_NB32 = weight_NB32 + blocks.minimum_NB[..., None]
    return weight_NB32.flatten(-2)


def _split_super(blocks_NSC: Tensor) -> Blocks:
    """Take Q4_K or Q5_K apart; a scale or minimum times its half float has at most 17 bits, so both are exact."""
    leading = blocks_NSC.shape[:-1]
    first, second, third = (blocks_NSC[..., at : at + 4].int() for at in (4, 8, 12))
    scale_NS8 = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minimum_NS8 = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    codes_NS432 = blocks_NSC[..., -128:].int().reshape(*leading, 4, 32)
    codes_NS832 = torch.stack([codes_NS432 & 15, codes_NS432 >> 4], dim=-2).flatten(-3, -2)
    if blocks_NSC.shape[-1] == BLOCK_FORMATS["q5_k"].nbytes:
        fifth_NS132 = blocks_NSC[..., None, 16:48].int()
        codes_NS832 |= _bits(fifth_NS132, torch.arange(8)[:, None], 1) << 4
    scale_NS8 = _halves(blocks_NSC[..., :2])[..., None] * scale_NS8
    minimum_NS8 = -(_halves(blocks_NSC[..., 2:4])[..., None] * minimum_NS8)
    return Blocks(codes_NS832.flatten(-3, -2), scale_NS8.flatten(-2), minimum_NS8.flatten(-2))


def _split_six_bits(blocks_NSC: Tensor) -> Blocks:
    """Take Q6_K apart: in each half two blocks of 32 are low halves of bytes and two are high; all share upper bits."""
    leading = blocks_NSC.shape[:-1]
    low_NS2232 = blocks_NSC[..., :128].int().reshape(*leading, 2, 2, 32)
    low_NS2432 = torch.cat([low_NS2232 & 15, low_NS2232 >> 4], dim=-2)
    upper_NS2132 = blocks_NSC[..., 128:192].int().reshape(*leading, 2, 1, 32)
    codes_NS2432 = (low_NS2432 | (_bits(upper_NS2132, 2 * torch.arange(4)[:, None], 3) << 4)) - 32
    half_scales_NSG = blocks_NSC[..., 192:208].contiguous().view(torch.int8).int()
    codes_NSG16 = codes_NS2432.reshape(*leading, 16, 16) * half_scales_NSG[..., None]
    scale_NS = _halves(blocks_NSC[..., 208:])
    codes_NB32 = codes_NSG16.reshape(*leading[:-1], -1, BLOCK)
    return Blocks(codes_NB32, scale_NS.repeat_interleave(8, dim=-1), None)


def _bits(values: Tensor, shifts: Tensor, mask: int) -> Tensor:
    return values >> shifts.to(values.device, torch.int32) & mask


def _halves(bytes_NB2: Tensor) -> Tensor:
    return bytes_NB2.contiguous().view(torch.float16).squeeze(-1).float()
