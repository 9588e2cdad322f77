"""The verdict is right as often as it says: effects are found, absent effects are not, at the stated error rate."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.records.compare import mcnemar, mean_interval, speedup, student_quantile

TRIALS = 400


def verdicts(effect, noise, num_seeds, trials=TRIALS, seed=0):
    """Simulate paired runs whose common seed-to-seed wobble is large and whose own noise is `noise`."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(trials):
        common = np.exp(rng.normal(0, 0.2, num_seeds))
        baseline = 100 * common * np.exp(rng.normal(0, noise, num_seeds))
        arm = 100 * effect * common * np.exp(rng.normal(0, noise, num_seeds))
        found.append(speedup(dict(enumerate(arm)), dict(enumerate(baseline))))
    return found


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_no_effect_is_called_one_at_most_as_often_as_stated(num_seeds):
    found = verdicts(effect=1.0, noise=0.01, num_seeds=num_seeds)
    wrong = sum(s.verdict in ("faster", "slower") for s in found) / TRIALS
    # 5% stated; three standard errors of a simulation of this size above it.
    assert wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)


@pytest.mark.parametrize("num_seeds", [3, 5, 10, 30])
def test_the_interval_holds_the_true_ratio_as_often_as_stated(num_seeds):
    found = verdicts(effect=1.03, noise=0.01, num_seeds=num_seeds, seed=num_seeds)
    covered = sum(s.low <= 1.03 <= s.high for s in found) / TRIALS
    assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / TRIALS)


def test_the_interval_also_holds_for_skewed_noise():
    rng = np.random.default_rng(1)
    samples = rng.exponential(1.0, size=(TRIALS, 20)) - 1.0
    covered = sum(low <= 0 <= high for low, high in map(mean_interval, samples)) / TRIALS
    assert covered >= 0.90


def test_three_percent_is_found_with_enough_seeds_in_both_directions():
    faster = verdicts(effect=1.03, noise=0.012, num_seeds=10)
    slower = verdicts(effect=1 / 1.03, noise=0.012, num_seeds=10)
    assert sum(s.verdict == "faster" for s in faster) / TRIALS > 0.95
    assert sum(s.verdict == "slower" for s in slower) / TRIALS > 0.95
    assert sum(s.verdict == "slower" for s in faster) == 0


def test_no_effect_with_enough_seeds_is_called_the_same():
    found = verdicts(effect=1.0, noise=0.012, num_seeds=10)
    assert sum(s.verdict == "same" for s in found) / TRIALS > 0.9


def test_too_much_noise_is_called_unclear_rather_than_the_same():
    found = verdicts(effect=1.0, noise=0.3, num_seeds=3)
    assert sum(s.verdict == "same" for s in found) == 0
    assert sum(s.verdict == "unclear" for s in found) / TRIALS > 0.9


def test_one_seed_proves_nothing():
    alone = speedup({0: 200.0}, {0: 100.0})
    assert (alone.ratio, alone.verdict, alone.num_pairs) == (pytest.approx(2.0), "unclear", 1)


def test_only_seeds_that_both_arms_have_are_compared():
    paired = speedup({0: 20.0, 1: 21.0, 9: 900.0}, {0: 10.0, 1: 10.5, 2: 1.0})
    assert (paired.ratio, paired.num_pairs) == (pytest.approx(2.0), 2)
    assert speedup({0: 1.0}, {1: 1.0}) is None


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=12))
def test_a_latency_halved_is_a_throughput_doubled(values):
    base = dict(enumerate(values))
    half = {seed: value / 2 for seed, value in base.items()}
    as_latency = speedup(half, base, higher_is_better=False)
    as_rate = speedup({s: 1 / v for s, v in half.items()}, {s: 1 / v for s, v in base.items()})
    assert as_latency.ratio == pytest.approx(2.0)
    assert as_latency.verdict == as_rate.verdict == "faster"


def test_students_quantiles_are_the_tabled_ones():
    for degrees, value in {1: 12.7062, 2: 4.3027, 4: 2.7764, 9: 2.2622, 30: 2.0423}.items():
        assert student_quantile(0.975, degrees) == pytest.approx(value, abs=1e-4)


def test_mcnemar_is_the_exact_binomial_test():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(1, 9) == pytest.approx(0.0215, abs=1e-4)
    assert mcnemar(9, 1) == mcnemar(1, 9)
