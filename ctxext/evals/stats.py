"""Intervals: Wilson for proportions, bootstrap over documents for perplexity and for paired differences.

Documents, not tokens, are resampled: the tokens of one text are far from independent, so an interval over
tokens would be several times too narrow. By numpy alone, which the core has; scipy's Wilson interval takes no sum
of shares, which RULER's score is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from ..errors import UsageError

RESAMPLES = 2000


def wilson(correct: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson, 1927): (low, high), both in [0, 1].

    Unlike the normal approximation it is honest at 0/n and n/n, where passkey results usually are:
    20/20 is [0.84, 1], not "1 ± 0".
    """
    if trials < 1 or not 0 <= correct <= trials:
        raise UsageError(f"{correct} correct out of {trials} trials isn't a proportion")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = correct / trials
    centre = p + z * z / (2 * trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # Exactly 0 and 1 at the ends; floating point would leave 1e-17 there.
    low = 0.0 if correct == 0 else (centre - half) / scale
    high = 1.0 if correct == trials else (centre + half) / scale
    return low, high


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats; inf instead of an OverflowError."""
    return math.exp(nll) if nll < 700 else math.inf


def _resampled(count: int, seed: int, resamples: int) -> np.ndarray:
    """Indices [resamples, count], drawn with replacement from `count` documents."""
    return np.random.default_rng(seed).integers(0, count, size=(resamples, count))


def bootstrap_interval(
    sums: Sequence[float],
    counts: Sequence[int],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> tuple[float, float] | None:
    """Percentile bootstrap over documents of `sum(sums) / sum(counts)`: (low, high), or None below two documents.

    `sums[d]` is document d's total NLL in nats and `counts[d]` its number of scored tokens, so the statistic is
    the token-weighted mean NLL; `perplexity` of the two ends is the interval of the perplexity.
    """
    total, weight = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if total.shape != weight.shape:
        raise UsageError(f"{total.size} sums but {weight.size} counts")
    if total.size < 2:
        return None
    drawn = _resampled(total.size, seed, resamples)
    means = total[drawn].sum(1) / weight[drawn].sum(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_difference(
    sums: Sequence[float],
    baseline: Sequence[float],
    counts: Sequence[int],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> dict[str, float | None]:
    """Mean NLL difference (nats per token) between two models on the *same* tokens of the same documents.

    Negative: `sums` is better than `baseline`. The difference between documents cancels, so this interval is much
    narrower than either model's own. Returns {"difference", "low", "high"}; the ends are None below two documents.
    """
    first, second = np.asarray(sums, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if first.shape != second.shape:
        raise UsageError(f"{first.size} documents against {second.size}: a paired difference needs the same ones")
    gap = first - second
    interval = bootstrap_interval(gap.tolist(), counts, seed=seed, resamples=resamples, confidence=confidence)
    low, high = interval or (None, None)
    return {"difference": float(gap.sum() / np.sum(counts)), "low": low, "high": high}
