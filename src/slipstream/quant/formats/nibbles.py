"""Two 4-bit codes to a byte: the one packing used inside, and the foreign ones it is converted to and from.

Inside, byte j of a row holds column 2j in its low nibble and column 2j + 1 in its high one. Read as little-endian
32-bit words this is Quark's pack order "order". Its "reorder" puts columns 0 2 4 6 1 3 5 7 in nibbles 0 to 7.
"""

import torch
from torch import Tensor


def pack_nibbles(codes_OI: Tensor) -> Tensor:
    """Pack integer codes, of which the low four bits count, into uint8 [O, I / 2]."""
    assert codes_OI.shape[-1] % 2 == 0, "an odd number of columns cannot be packed"
    if codes_OI.dtype == torch.int8:
        pairs = codes_OI.contiguous().view(torch.int16)
        return ((pairs & 0xF) | ((pairs >> 4) & 0xF0)).to(torch.uint8)
    assert codes_OI.dtype in (torch.int16, torch.int32)
    if codes_OI.dtype == torch.int32:
        codes_OI = codes_OI.to(torch.int16)
    pairs = codes_OI.contiguous().view(torch.int32)
    return ((pairs & 0xF) | ((pairs >> 12) & 0xF0)).to(torch.uint8)


def unpack_unsigned(packed: Tensor) -> Tensor:
    """Return the codes 0 to 15 of packed nibbles, as uint8 with twice the columns."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def unpack_signed(packed: Tensor) -> Tensor:
    """Return packed nibbles as two's complement int8 codes -8 to 7."""
    low = (packed << 4).view(torch.int8) >> 4
    return torch.stack([low, packed.view(torch.int8) >> 4], dim=-1).flatten(-2)


def to_words(packed: Tensor, reorder: bool) -> Tensor:
    """Return packed nibbles as Quark's int32 words, in its pack order "order" or "reorder"."""
    words = packed.contiguous().view(torch.int32)
    if not reorder:
        return words
    even, odd = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    return _gather_bytes(even) | (_gather_bytes(odd) << 16)


def from_words(words: Tensor, reorder: bool) -> Tensor:
    """Return Quark's int32 words as packed nibbles."""
    if reorder:
        words = _spread_bytes(words & 0xFFFF) | (_spread_bytes((words >> 16) & 0xFFFF) << 4)
    return words.contiguous().view(torch.uint8)


def _gather_bytes(words: Tensor) -> Tensor:
    """Close the gaps between four nibbles that lie one to a byte."""
    words = (words | (words >> 4)) & 0x00FF00FF
    return (words | (words >> 8)) & 0xFFFF


def _spread_bytes(words: Tensor) -> Tensor:
    """Give each of the four low nibbles a byte of its own."""
    words = (words | (words << 8)) & 0x00FF00FF
    return (words | (words << 4)) & 0x0F0F0F0F
