"""What the sampler's kernels know of tokens: settings, order, weights, noise and the best of a block.

Definitions are those of `slipstream.kernels.sampling`; weights and noise are the reference's to the bit.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.reference.sampling import EXP2_MINUS, LOG2_E
from slipstream.kernels.sampling import Column, Uses

PENALTIES, BIAS, TOP_K, TOP_P, MIN_P, TRUNCATION = (
    tl.constexpr(int(use)) for use in (Uses.PENALTIES, Uses.BIAS, Uses.TOP_K, Uses.TOP_P, Uses.MIN_P, Uses.TRUNCATION)
)
SEED, USES, K, MIN_UNTIL, NUM_TOP, TEMPERATURE, P, LEAST, REPETITION, FREQUENCY, PRESENCE = (
    tl.constexpr(int(column)) for column in list(Column)[:-1]
)
COLUMNS = tl.constexpr(len(Column))
C5, C4, C3, C2, C1, C0 = (tl.constexpr(float(coefficient)) for coefficient in EXP2_MINUS)
TO_LOG2 = tl.constexpr(LOG2_E)
NOTHING = tl.constexpr(-2139095041)
"""The key of -inf: no token."""
NO_ENTRY = tl.constexpr(2147483647)
NO_TOKEN = tl.constexpr((-2139095041 << 32) + 2147483647)
"""No order is lower, but for tokens of -inf."""


@triton.jit
def no_entry():
    """Return NO_ENTRY as a value that a loop may change."""
    return tl.full([], NO_ENTRY, tl.int32)


@triton.jit
def whole_setting(records_ptr, slot, COLUMN: tl.constexpr):
    """Return a whole number of a slot's record."""
    return tl.load(records_ptr + slot * COLUMNS + COLUMN)


@triton.jit
def setting(records_ptr, slot, COLUMN: tl.constexpr):
    """Return a float64 of a slot's record."""
    return tl.load(records_ptr + slot * COLUMNS + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def number(logits):
    """Return logits as float32: -inf for what is no number, and one zero."""
    logits = logits.to(tl.float32)
    logits = tl.where(logits != logits, float("-inf"), logits)
    return tl.where(logits == 0, 0.0, logits)


@triton.jit
def key_of(logits):
    """Return int32 keys in the order of the logits."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """Return the logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def order_of(logits, entry):
    """Return one int64 that orders tokens: by logit, highest first, equal ones by id; the first has the largest."""
    return (key_of(logits).to(tl.int64) << 32) + (entry ^ 0x7FFFFFFF)


@triton.jit
def entry_of(order):
    """Return the token of an order."""
    return ((order & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32)


@triton.jit
def weight(logits, highest, temperature):
    """Return each token's whole weight, int64."""
    distance = tl.where(logits == highest, 0.0, highest - logits)
    y = tl.minimum(tl.div_rn(distance, tl.zeros_like(distance) + temperature) * TO_LOG2, 63.0)
    whole = tl.floor(y)
    f = y - whole
    power = ((((C5 * f + C4) * f + C3) * f + C2) * f + C1) * f + C0
    shifted = (power * 2147483648.0).to(tl.uint32) >> tl.minimum(whole, 31.0).to(tl.uint32)
    return tl.where(whole < 32, shifted, 0).to(tl.int64)


@triton.jit
def least_above(bound):
    """Return the smallest whole number that is not below a float64."""
    whole = bound.to(tl.int64)
    return whole + (whole.to(tl.float64) < bound).to(tl.int64)


@triton.jit
def _philox(counter, position, seed):
    """Return the four words of Philox4x32-10 for counters (counter, position, 0, 0)."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    a = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    b = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, a), c0 * a
        high1, low1 = tl.umulhi(c2, b), c2 * b
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def exact_noise(token, position, seed):
    """Return the float32 noise of tokens."""
    c0, c1, c2, c3 = _philox(token >> 2, position, seed)
    lane = token & 3
    word = tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def _rough_noise(first, position, seed, BLOCK: tl.constexpr):
    """Return the noise of tokens first .. first + BLOCK - 1 within 1e-4; `first` is a multiple of 4."""
    c0, c1, c2, c3 = _philox((first >> 2) + tl.arange(0, BLOCK // 4), position, seed)
    word = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3)).to(tl.int32, bitcast=True)
    high = word < 0  # u > 1/2: -log u from 1 - u, which keeps its digits
    part = (tl.where(high, ~word, word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    z = part / (2.0 - part)
    zz = z * z
    series = 2.0 * z * (1.0 + zz * (1 / 3 + zz * (1 / 5 + zz * (1 / 7 + zz * (1 / 9 + zz / 11)))))
    return -tl.log(tl.where(high, series, -tl.log(part)))


@triton.jit
def certain_score(highest, temperature):
    """Return what logits / T + noise of the highest logit is sure to exceed."""
    scaled = tl.div_rn(highest, temperature)
    return scaled - 3.15 - 1e-6 * tl.abs(scaled)


@triton.jit
def draw_best(logits, first, temperature, position, seed, best, at, BLOCK: tl.constexpr):
    """Return the better of (best, at) and the best of logits / T + noise of a block; equal ones to the earlier.

    Noise is first had roughly; only what then comes within its error of the best is given the exact one.
    """
    entry = first + tl.arange(0, BLOCK)
    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    most = tl.max(scaled, 0)
    if (most > float("-inf")) & (most + 22.9 >= best):
        rough = scaled + _rough_noise(first, position, seed, BLOCK)
        top = tl.maximum(tl.max(rough, 0), best)
        left = (rough >= top - 4e-3 - 2e-6 * tl.abs(top)) & (scaled > float("-inf"))
        for _ in range(tl.sum(left.to(tl.int32), 0)):
            token = tl.min(tl.where(left, entry, NO_ENTRY), 0)
            here = entry == token
            score = tl.max(tl.where(here, scaled, float("-inf")), 0) + exact_noise(token, position, seed)
            if score > best:
                best, at = score, token
            left = left & ~here
    return best, at
