"""A cheaper search for the same space: a look at S curves, then CMA-ES, racing over documents.

What makes it cheaper than the paper's evolution:

- Factors that were found, and YaRN's, rise from 1 to about the scale along an S over the frequencies. So it begins
  with a few dozen S curves (three numbers each), spread evenly over all that are sensible. The best of them is
  nearer to what evolution ends with than PI, NTK and YaRN are.
- From there CMA-ES (Hansen 2016, arXiv:1604.00772; the package `cma`) moves the logarithms of all factors. What
  matters is a narrow valley across the fast frequencies, and its covariance learns the valley's direction, where
  mutations of single factors must step across it. Fast frequencies are moved less: they make more turns.
- Both need only the order within a generation, and one document orders candidates nearly as all do: so a
  generation is read on one document, the next generation on the next one. (Shorter beginnings of all documents
  order them badly: what is at stake stands at the end.)
- A candidate that beats the best one on that document races it over the others, and is dropped as soon as the
  paired differences on the documents seen say that it's worse. Only what survives all becomes the best.
- n-hat hardly depends on the factors: its values are halved document by document on the best ones, twice (once if
  there are few tokens to spend, not at all if there are very few).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..evaluator import Evaluator, Problem
from ..space import Candidate
from . import strategy

if TYPE_CHECKING:
    import numpy as np

FEW = 25
"""Readings of a document per factor, below which CMA-ES over all factors is no use."""


@strategy
def curve(
    problem: Problem,
    *,
    evaluations: int = 268,
    survey: int = 32,
    sigma: float = 0.1,
    fastest: float = 0.2,
    population: int = 8,
    margin: float = 0.0,
) -> None:
    """`survey` S curves, then CMA-ES over all factors from the best of them, within `evaluations`.

    evaluations: full evaluations (all documents) that the tokens spent come to, 268 being a fifth of the paper's
    1,344. sigma: first step of the slowest frequency's factor, as a share of the logarithm of the largest one;
    fastest: that of the fastest, as a share of the slowest's; between them steps grow evenly.
    population: candidates per generation. margin: standard errors by which a racing candidate must be worse to be
    dropped.
    With few tokens for many factors half of them goes to the survey, and CMA-ES begins with the three numbers of
    an S, in smaller generations.
    """
    import numpy as np

    if sigma <= 0 or fastest <= 0 or population < 4:
        raise UsageError("strategy 'curve' needs steps above 0 and a population of at least 4")
    evaluator, size, top = problem.evaluator, problem.space.size, problem.space.top
    evaluator.means(list(problem.seeds.values()))
    limit = min(evaluations * evaluator.full_cost(), evaluator.budget)
    # What choosing n-hat costs. A small budget is better spent on the factors: they matter more.
    reading = max(evaluator.sizes)
    choice = 2 * len(problem.space.start_tokens) * reading
    choices = 0 if len(problem.space.start_tokens) == 1 or limit < 3 * choice else 1 if limit < 8 * choice else 2
    limit -= min(choices, 1) * choice
    few = limit < FEW * size * reading
    descent = _Descent(problem, np.random.RandomState(problem.seed), population, margin)
    left = (limit - evaluator.tokens) / reading
    start = descent.survey(spread(max(0, min(survey, int(left / (2 if few else 8)))), size))
    if few:
        half = (evaluator.tokens + limit) / 2
        descent.run(lambda p: s_curve(p, size, top), start, [3 * sigma, sigma * size, 6 * sigma], half)
    if choices == 2:
        choose_start_tokens(evaluator)
    widths = sigma * max(math.log(top), problem.space.step) * np.linspace(fastest, 1, size)

    def from_best(width: float, until: float) -> None:
        base = np.log(evaluator.best.factors)
        descent.run(lambda p: np.exp(base + p).tolist(), [0.0] * size, width * widths, until)

    from_best(1.0, (evaluator.tokens + limit) / 2)
    spent = -1
    # It may end before the limit, its steps being tiny. Begun again, it spends nothing if there's nothing left.
    while evaluator.tokens != spent:
        spent = evaluator.tokens
        from_best(0.5, limit)
    if choices:
        choose_start_tokens(evaluator)


@dataclass
class _Descent:
    """CMA-ES over points that become candidates. chance: its own generator; cma would take numpy's global one."""

    problem: Problem
    chance: np.random.RandomState
    population: int
    margin: float
    generations: int = 0

    def survey(self, points: Sequence[Sequence[float]]) -> list[float]:
        """The best of some S curves and of the S nearest to the best candidate, read on one document."""
        space = self.problem.space
        tried = [*points, fit_s_curve(self.problem.evaluator.best.factors, space.top)]
        losses = self._read([s_curve(p, space.size, space.top) for p in tried])
        return list(tried[min(range(len(tried)), key=losses.__getitem__)])

    def run(
        self,
        decode: Callable[[Any], Sequence[float]],
        start: Sequence[float],
        widths: Iterable[float],
        limit: float,
    ) -> None:
        """Until so many tokens were spent, or steps are tiny.

        decode: a point to factors. start: the first mean; widths: each coordinate's first standard deviation.
        """
        import cma
        import numpy as np

        evaluator, reading = self.problem.evaluator, max(self.problem.evaluator.sizes)
        population = min(self.population, max(4, int((limit - evaluator.tokens) / reading / 4)))
        generation = population * reading
        options: dict[str, Any] = {"verbose": -9, "randn": lambda *shape: self.chance.randn(*shape)}
        # cma has no problems of one dimension: a second one that nothing depends on.
        more = 2 - min(len(start), 2)
        options |= {"seed": math.nan, "CMA_stds": [*widths, *[1.0] * more], "popsize": population}
        options["tolx"] = 0.1 * self.problem.space.step
        search = cma.CMAEvolutionStrategy([*start, *[0.0] * more], 1.0, options)
        while not search.stop() and evaluator.tokens + generation <= limit:
            points = search.ask()
            search.tell(points, self._read([decode(np.asarray(p[: len(start)])) for p in points]))

    def _read(self, wanted: Sequence[Sequence[float]]) -> list[float]:
        """Losses of factors on the next document; whatever beats the best there races it over the others."""
        evaluator = self.problem.evaluator
        made = [self.problem.space.candidate(factors, evaluator.best.start_tokens) for factors in wanted]
        document = self.generations % len(evaluator.sizes)
        self.generations += 1
        losses = [row[0] for row in evaluator.losses(made, [document])]
        for i in sorted(range(len(made)), key=losses.__getitem__):
            if not race(evaluator, made[i], document, self.margin):
                break
        return losses


def s_curve(point: Sequence[float], size: int, top: float) -> list[float]:
    """Factors 1 -> exp(height * ln top) along an S in the logarithm: point is (height, centre, ln width).

    Centre and width are in frequencies. Rising from 1 to about the scale within a few frequencies is the shape of
    YaRN's ramp and of every published result of the search.
    """
    height, centre, width = point[0] * math.log(top), point[1], math.exp(min(point[2], 6))
    # Clamped: exp overflows long after the curve is flat.
    slopes = [max(-60.0, min(60.0, (centre - i) / width)) for i in range(size)]
    return [math.exp(height / (1 + math.exp(slope))) for slope in slopes]


def spread(count: int, size: int) -> list[list[float]]:
    """`count` points of `s_curve`, spread over heights 0.6 to 1, centres everywhere, widths 0.01 to 0.3 of all.

    An additive recurrence as by Roberts (2018): the same points every time, spread evenly however many there are.
    """
    # The root of x^4 = x + 1, his choice for three numbers.
    root = 1.2207440846057596
    found = []
    for n in range(1, count + 1):
        u, v, w = ((0.5 + n / root**k) % 1 for k in (1, 2, 3))
        found.append([0.6 + 0.4 * v, size * u, math.log(size * 0.01) + w * math.log(30)])
    return found


def fit_s_curve(factors: Sequence[float], top: float) -> list[float]:
    """The point of `s_curve` nearest to a list of factors, in squares of logarithms, on a coarse grid."""
    size = len(factors)
    logs = [math.log(f) for f in factors]

    def distance(point: Sequence[float]) -> float:
        return sum((math.log(a) - b) ** 2 for a, b in zip(s_curve(point, size, top), logs, strict=True))

    grid = itertools.product(
        [k / 10 for k in range(1, 11)],
        [k * size / 32 for k in range(33)],
        [math.log(size * w) for w in (0.02, 0.05, 0.1, 0.2, 0.4)],
    )
    return list(min(grid, key=distance))


def race(evaluator: Evaluator, candidate: Candidate, first: int, margin: float = 0.0) -> bool:
    """Read `candidate` on one document after the other, from `first` on, until it's worse than the best one.

    Worse: the mean of the paired differences is more than `margin` standard errors above 0. True if it has been
    read on all documents and is the best one now.
    """
    best = evaluator.best
    count = len(evaluator.sizes)
    order = [(first + i) % count for i in range(count)]
    differences: list[float] = []
    for document in order:
        new, old = evaluator.losses([candidate, best], [document])
        differences.append(new[0] - old[0])
        if worse(differences, margin):
            return False
    return evaluator.best == candidate


def worse(differences: Sequence[float], margin: float) -> bool:
    """Whether the mean of paired differences is above 0 by more than `margin` of its standard errors."""
    count = len(differences)
    mean = sum(differences) / count
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / max(1, count - 1) / count)
    return mean > margin * spread


def choose_start_tokens(evaluator: Evaluator) -> None:
    """Halve the values of n-hat document by document, on the best factors, until one is left; evaluate that."""
    left = [Candidate(evaluator.best.factors, n) for n in evaluator.space.start_tokens]
    sums = dict.fromkeys(left, 0.0)
    for document in evaluator.documents:
        if len(left) == 1:
            break
        for candidate, (loss,) in zip(left, evaluator.losses(left, [document]), strict=True):
            sums[candidate] += loss
        left = sorted(left, key=sums.__getitem__)[: (len(left) + 1) // 2]
    evaluator.means(left[:1])
