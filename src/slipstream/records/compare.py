"""Decides from paired runs whether one arm is faster, the same or slower, and how sure that is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
SAME_WITHIN = 0.05
RESAMPLES = 4000

Verdict = Literal["faster", "same", "slower", "unclear"]


@dataclass(frozen=True)
class Speedup:
    """Ratio of an arm to its baseline (more than 1 is better), its interval, and the verdict drawn from it.

    `unclear` means the interval holds 1 but also effects larger than `SAME_WITHIN`: more seeds are needed.
    """

    ratio: float
    low: float
    high: float
    num_pairs: int
    verdict: Verdict


def speedup(
    arm_by_seed: Mapping[int, float], baseline_by_seed: Mapping[int, float], higher_is_better: bool = True
) -> Speedup | None:
    """Compare an arm with its baseline over the seeds both have; None when they share none."""
    shared = arm_by_seed.keys() & baseline_by_seed.keys()
    # A figure of nought (TPOT of answers that came in one piece) has no ratio.
    seeds = sorted(seed for seed in shared if arm_by_seed[seed] > 0 and baseline_by_seed[seed] > 0)
    if not seeds:
        return None
    sign = 1.0 if higher_is_better else -1.0
    logs = [sign * math.log(arm_by_seed[seed] / baseline_by_seed[seed]) for seed in seeds]
    low, high = mean_interval(logs)
    return Speedup(
        ratio=math.exp(float(np.mean(logs))),
        low=math.exp(low) if math.isfinite(low) else 0.0,
        high=math.exp(high) if math.isfinite(high) else math.inf,
        num_pairs=len(seeds),
        verdict=_verdict(low, high),
    )


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return a confidence interval of the mean: a bootstrap, never narrower than Student's.

    The percentile bootstrap alone is too sure of itself with few values (three seeds cover 75% at best, since no
    resample leaves their range), so its level is expanded for the sample size and Student's interval is the floor.
    """
    sample = np.asarray(values, dtype=np.float64)
    n = len(sample)
    if n < 2:
        return -math.inf, math.inf
    mean, error = float(sample.mean()), float(sample.std(ddof=1)) / math.sqrt(n)
    t = student_quantile(0.5 + confidence / 2, n - 1)
    tail = NormalDist().cdf(-t * math.sqrt(n / (n - 1)))
    # A fixed generator: the same records must always give the same report.
    picks = np.random.default_rng(0).integers(0, n, size=(RESAMPLES, n))
    low, high = np.quantile(sample[picks].mean(axis=1), (tail, 1 - tail))
    return min(float(low), mean - t * error), max(float(high), mean + t * error)


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t for `probability` above one half, by bisection on its exact distribution."""
    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def mcnemar(changes_to_right: int, changes_to_wrong: int) -> float:
    """Return the exact two-sided p-value that paired answers changed in both directions equally often."""
    n = changes_to_right + changes_to_wrong
    if n == 0:
        return 1.0
    tail: float = sum(math.comb(n, k) for k in range(min(changes_to_right, changes_to_wrong) + 1)) / 2**n
    return min(1.0, float(2 * tail))


def _verdict(low: float, high: float) -> Verdict:
    if low > 0:
        return "faster"
    if high < 0:
        return "slower"
    return "same" if max(-low, high) <= math.log1p(SAME_WITHIN) else "unclear"


def _student_cdf(t: float, degrees: int) -> float:
    # The finite trigonometric series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
    theta = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(theta)
    term = cosine if degrees % 2 else 1.0
    total = 0.0
    for k in range(degrees % 2 + 1, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    inside = math.sin(theta) * total
    central = (theta + inside) * 2 / math.pi if degrees % 2 else inside
    return 0.5 + central / 2
