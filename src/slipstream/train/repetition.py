"""Finding where a text starts to repeat itself: small targets loop under greedy decoding.

A text loops once some span of at least 16 tokens stands three times in a row. Any shorter period makes such a span
too, so it is enough to look for runs that repeat with a period.
"""

from collections.abc import Sequence

import numpy as np

MIN_SPAN = 16
MAX_PERIOD = 48
_HASH_FACTORS = np.cumprod(np.full(MIN_SPAN, 6364136223846793005, dtype=np.int64))  # wraps, as hashes may


def loop_end(tokens: Sequence[int]) -> int | None:
    """Return how many tokens to keep: up to the end of the first span's third repetition; None if none loops."""
    a = np.asarray(tokens, dtype=np.int64)
    if len(a) < 3 * MIN_SPAN or not _repeats_a_span(a):
        return None
    best: int | None = None
    for period in range(1, min(MAX_PERIOD, len(a) // 3) + 1):
        span = period * -(-MIN_SPAN // period)
        needed = 3 * span - period
        if needed > len(a) - period:
            continue
        start = _first_run(a[period:] == a[:-period], needed)
        if start is not None and (best is None or start + 3 * span < best):
            best = start + 3 * span
    return best


def _repeats_a_span(a: np.ndarray) -> bool:
    """Tell quickly, for the many texts that do not loop, whether any 16-token span may occur twice."""
    hashes = np.convolve(a, _HASH_FACTORS, mode="valid")
    return len(np.unique(hashes)) < len(hashes)


def _first_run(same: np.ndarray, needed: int) -> int | None:
    """Return where the first run of `needed` true values starts."""
    padded = np.concatenate([[False], same, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    starts, ends = edges[::2], edges[1::2]
    long_enough = np.flatnonzero(ends - starts >= needed)
    return int(starts[long_enough[0]]) if len(long_enough) else None
