"""Gumbel noise without state: a counter-based hash of (seed, position, token id), the same on every device.

The hash is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3"), keyed by the
64-bit seed; the counter is (token id // 4, position, 0, 0) and word `token id % 4` of the output is the token's. The
word x becomes u = (x + 1/2) / 2^32, exact in float64, and the noise is -log(-log u), computed in float64 and rounded
to float32 once, so that libraries whose logarithms differ in the last bit still agree.
"""

import torch
from torch import Tensor

NOISE_MAX = 22.875
"""No noise is larger: -log(-log(1 - 2^-33))."""
NOISE_MIN = -3.131
"""No noise is smaller: -log(-log(2^-33))."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit output words of Philox4x32-10; all tensors are int64 holding values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Return float32 noise for int64 tensors of one (broadcast) shape."""
    zero = torch.zeros_like(seed + position + token_ids)
    words = philox((token_ids >> 2, position & _MASK, zero, zero), (seed & _MASK, (seed >> 32) & _MASK))
    lane = token_ids & 3
    x = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))
    u = (x.double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(u))).float()


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low words of a 32 x 32 bit product; int64 wraps, which leaves its 64 bits right."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK
