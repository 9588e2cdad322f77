"""Noise without state: counter-based hashes of (seed, position, token id), the same on every device.

Gumbel noise hashes with Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3"),
keyed by the 64-bit seed; the counter is (token id // 4, position, 0, 0) and word `token id % 4` of the output is the
token's. The word x becomes u = (x + 1/2) / 2^32, exact in float64, and the noise is -log(-log u), computed in float64
and rounded to float32 once, so that libraries whose logarithms differ in the last bit still agree.
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
_SEED_STEP = 0x9E3779B97F4A7C15 - 2**64
_POSITION_STEP = 0xD1B54A32D192ED03 - 2**64
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


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


def scattered(seed: Tensor, position: Tensor) -> Tensor:
    """Return one number below 2^32 for each (seed, position), int64: the upper half of splitmix64's finalizer."""
    x = seed * _SEED_STEP + position * _POSITION_STEP  # products wrap, which is what it wants
    for shift, multiplier in _MIXERS:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    x = x ^ ((x >> 31) & (2**33 - 1))
    return (x >> 32) & _MASK


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low words of a 32 x 32 bit product; int64 wraps, which leaves its 64 bits right."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK
