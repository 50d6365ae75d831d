"""The search space of LongRoPE: one factor per frequency, never falling with the frequency's index, and n-hat.

Ding et al. 2024, arXiv:2402.13753, section 3.1: lambda_i in [1, 1.25 s] in steps of 0.01, lambda_i <=
lambda_(i+1), and the number of first positions that keep their original angles from a short list. Every candidate
that a strategy makes is checked against its `Space` before it is evaluated. Plain data, no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .. import methods
from ..errors import UsageError
from ..rope import Rope, Schedule

START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""n-hat in the paper, table 3."""
SEEDS = ("pi", "ntk", "yarn")
"""The methods that the paper starts its population from."""


@dataclass(frozen=True)
class Candidate:
    """What is searched for. factors: what each frequency is divided by. start_tokens: n-hat."""

    factors: tuple[float, ...]
    start_tokens: int = 0


@dataclass(frozen=True)
class Space:
    """The candidates for `size` frequencies at scale `factor`.

    upper: the largest factor, as a share of the scale. step: the grid that factors lie on. start_tokens: the
    values that n-hat may take, ascending. floors: the smallest factor of each frequency; empty: 1 for all.
    Raises UsageError for a space without a candidate.
    """

    size: int
    factor: float
    upper: float = 1.25
    step: float = 0.01
    start_tokens: tuple[int, ...] = START_TOKENS
    floors: tuple[float, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "start_tokens", tuple(sorted(set(self.start_tokens))))
        object.__setattr__(self, "floors", tuple(self.floors) or (1.0,) * self.size)
        if not 0 < self.step <= 1:
            raise UsageError(f"the step between factors must be above 0 and at most 1, not {self.step}")
        if not self.start_tokens or self.start_tokens[0] < 0:
            raise UsageError(f"start tokens must be a list of numbers from 0, not {list(self.start_tokens)}")
        if len(self.floors) != self.size or min(self.floors) < 1:
            raise UsageError(f"the search needs {self.size} smallest factors of at least 1")
        if max(self.floors) > self.top + 1e-9:
            raise UsageError(
                f"no factor may be above {self.top:g}, but some must be at least {max(self.floors):g}",
                hint="raise --upper",
            )

    @property
    def top(self) -> float:
        """The largest factor on the grid."""
        return self._value(self._ceiling)

    @property
    def _ceiling(self) -> int:
        return math.floor((max(1.0, self.upper * self.factor) - 1) / self.step + 1e-9)

    def _value(self, steps: int) -> float:
        return round(1 + steps * self.step, 10)

    def _floor(self, i: int) -> int:
        return min(math.ceil((self.floors[i] - 1) / self.step - 1e-9), self._ceiling)

    def candidate(self, factors: Sequence[float], start_tokens: int = 0) -> Candidate:
        """The candidate nearest to any list of factors: rounded to the grid, kept within bounds, made monotone."""
        if len(factors) != self.size:
            raise UsageError(f"{len(factors)} factors given for {self.size} frequencies")
        found, least = [], 0
        for i, factor in enumerate(factors):
            least = max(least, self._floor(i))
            # A stopped frequency has an infinite factor.
            least = max(least, min(round((min(factor, self.top) - 1) / self.step), self._ceiling))
            found.append(self._value(least))
        nearest = min(self.start_tokens, key=lambda n: (abs(n - start_tokens), n))
        return Candidate(tuple(found), nearest)

    def between(self, rng: random.Random, i: int, low: float, high: float) -> float:
        """A factor for frequency i, drawn evenly from the grid points in [low, high] that it may take."""
        first = max(round((low - 1) / self.step), self._floor(i))
        return self._value(rng.randint(first, max(first, round((high - 1) / self.step))))

    def any(self, rng: random.Random) -> Candidate:
        """A candidate drawn at random: evenly drawn factors, sorted."""
        drawn = sorted(self.between(rng, 0, 1, self.top) for _ in range(self.size))
        return self.candidate(drawn, rng.choice(self.start_tokens))

    def violation(self, candidate: Candidate) -> str | None:
        """Which constraint a candidate breaks, or None."""
        if len(candidate.factors) != self.size:
            return f"{len(candidate.factors)} factors for {self.size} frequencies"
        if candidate.start_tokens not in self.start_tokens:
            return f"start_tokens {candidate.start_tokens} is not one of {self.start_tokens}"
        if any(b < a for a, b in pairwise(candidate.factors)):
            return "the factors fall somewhere"
        for i, factor in enumerate(candidate.factors):
            if not self._value(self._floor(i)) <= factor <= self.top:
                return f"factor {i} is {factor}, outside [{self._value(self._floor(i))}, {self.top}]"
            if self._value(round((factor - 1) / self.step)) != factor:
                return f"factor {i} is {factor}, off the grid of {self.step}"
        return None


def factors_of(schedule: Schedule) -> list[float]:
    """What the last stage of a schedule divides each frequency by, relative to its rope. inf for a stopped one."""
    before, now = schedule.rope.inv_freq(), schedule.stages[-1].inv_freq
    return [f / g if g else math.inf for f, g in zip(before, now, strict=True)]


def seeds(rope: Rope, factor: float, space: Space, previous: Schedule | None = None) -> dict[str, Candidate]:
    """What a search starts from: PI, NTK and YaRN at `factor`, as candidates.

    previous: the schedule that the model runs already (a folder that was searched, and perhaps tuned, at a smaller
    factor). It is a seed itself, and so is its product with each method at what is left of the factor: the
    progressive extension of LongRoPE, section 3.3.
    """
    found = {name: factors_of(methods.schedule(rope, name, factor)) for name in _fitting(rope)}
    start_tokens = 0
    if previous is not None:
        reached, start_tokens = factors_of(previous), previous.start_tokens
        found["previous"] = reached
        rest = max(1.0, factor / previous.factor)
        for name in _fitting(rope):
            more = factors_of(methods.schedule(rope, name, rest))
            found[f"previous, {name}"] = [a * b for a, b in zip(reached, more, strict=True)]
    return {
        name: space.candidate(factors, start_tokens if name.startswith("previous") else 0)
        for name, factors in found.items()
    }


def _fitting(rope: Rope) -> Iterable[str]:
    return (name for name in SEEDS if name != "ntk" or rope.dim >= 4)


def critical_frequency(rope: Rope) -> int:
    """Index of the first frequency that made less than a full turn in training (LongRoPE2, arXiv:2502.20082).

    From there on the model has not seen every angle, so positions past the trained length bring new ones unless
    the frequency is divided by the whole scale. The number of frequencies if all made a turn.
    """
    return next((i for i, turns in enumerate(rope.turns()) if turns < 1), rope.size)


def critical_floors(size: int, factor: float, critical: int) -> tuple[float, ...]:
    """The smallest factors under LongRoPE2's constraint: the scale itself from frequency `critical` on."""
    if not 0 <= critical <= size:
        raise UsageError(f"the critical frequency must lie in 0..{size}, not {critical}")
    return (1.0,) * critical + (float(factor),) * (size - critical)


def as_params(candidate: Candidate, **more) -> Mapping[str, object]:
    """A candidate as options of the method `longrope`."""
    return {"long_factor": list(candidate.factors), "start_tokens": candidate.start_tokens, **more}
