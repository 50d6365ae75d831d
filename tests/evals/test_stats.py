"""Intervals against published values, scipy and simulation."""

from __future__ import annotations

import math
import random

import pytest

from ctxext.errors import UsageError
from ctxext.evals.stats import bootstrap_interval, paired_difference, perplexity, wilson


@pytest.mark.parametrize(
    ("correct", "trials", "low", "high"),
    [
        # n of n: the lower end is n / (n + z^2).
        (5, 5, 0.566, 1),
        (10, 10, 0.722, 1),
        (20, 20, 0.839, 1),
        (50, 50, 0.929, 1),
        (100, 100, 0.963, 1),
        (500, 500, 0.992, 1),
        (0, 10, 0, 0.278),
        (18, 20, 0.699, 0.972),
        # Newcombe (1998), table I, method 3: 81/263, 15/148, 1/29.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_known_values(correct, trials, low, high):
    own = wilson(correct, trials)
    digits = 4 if isinstance(low, float) and len(str(low)) > 5 else 3
    assert own == (pytest.approx(low, abs=0.6 * 10**-digits), pytest.approx(high, abs=0.6 * 10**-digits))
    assert 0 <= own[0] <= correct / trials <= own[1] <= 1


def test_wilson_equals_scipy():
    stats = pytest.importorskip("scipy.stats")
    for trials in (1, 2, 7, 40):
        for correct in range(trials + 1):
            for confidence in (0.8, 0.95, 0.99):
                theirs = stats.binomtest(correct, trials).proportion_ci(confidence, method="wilson")
                assert wilson(correct, trials, confidence) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@pytest.mark.parametrize(("correct", "trials"), [(1, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_proportion(correct, trials):
    with pytest.raises(UsageError):
        wilson(correct, trials)


def test_perplexity_overflows_to_infinity():
    assert perplexity(2.0) == math.exp(2)
    assert perplexity(1e6) == math.inf


def test_bootstrap_is_reproducible_and_covers():
    draw = random.Random(0)
    sums, counts = [100 * draw.gauss(3, 0.5) for _ in range(40)], [100] * 40
    interval = bootstrap_interval(sums, counts, seed=5)
    assert interval == bootstrap_interval(sums, counts, seed=5)
    assert interval != bootstrap_interval(sums, counts, seed=6)
    mean = sum(sums) / sum(counts)
    assert interval[0] < mean < interval[1]
    # Against theory: a mean of 40 draws with deviation 0.5 has a 95 % interval of +- 1.96 * 0.5 / sqrt(40).
    assert (interval[1] - interval[0]) / 2 == pytest.approx(1.96 * 0.5 / math.sqrt(40), rel=0.3)
    assert bootstrap_interval([300.0], [100]) is None


def test_bootstrap_weighs_documents_by_their_tokens():
    # One long and one short document: the statistic of each resample is a ratio of sums, never a mean of means.
    low, high = bootstrap_interval([1000.0, 3.0], [1000, 1], seed=0)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(3.0)
    mixed = bootstrap_interval([1000.0, 3.0], [1000, 1], seed=0, confidence=0.01)
    assert mixed == (pytest.approx(1003 / 1001, abs=1e-3), pytest.approx(1003 / 1001, abs=1e-3))


def test_a_paired_difference_is_narrower_than_its_parts():
    draw = random.Random(1)
    baseline = [100 * draw.gauss(3, 0.5) for _ in range(30)]
    better = [value - 100 * draw.gauss(0.02, 0.005) for value in baseline]
    row = paired_difference(better, baseline, [100] * 30)
    assert row["low"] < row["difference"] < row["high"] < 0
    assert row["difference"] == pytest.approx(-0.02, abs=0.005)
    alone = bootstrap_interval(better, [100] * 30)
    assert row["high"] - row["low"] < 0.1 * (alone[1] - alone[0])
    assert paired_difference([1.0], [2.0], [10]) == {"difference": -0.1, "low": None, "high": None}
    with pytest.raises(UsageError, match="same ones"):
        paired_difference([1.0, 2.0], [1.0], [1, 1])
