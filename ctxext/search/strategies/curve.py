"""A cheaper search for the same space: few parameters first, CMA-ES, racing over documents.

What makes it cheaper than evolution over single factors:

- Factors that were found, and YaRN's, rise from 1 to about the scale along an S over the frequencies. So the
  search begins with the three parameters of an S, goes on with a correction through a few knots, added to the
  logarithm of the best factors so far, both by CMA-ES (Hansen 2016, arXiv:1604.00772; the package `cma`), and ends
  with single factors, by steps from the best candidate.
- All three need only the order within a generation, and one document orders candidates nearly as all do: so a
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError, UsageError

from ..evaluator import Evaluator, Problem
from ..space import Candidate
from . import strategy

if TYPE_CHECKING:
    import numpy as np


@strategy
def curve(
    problem: Problem,
    *,
    evaluations: int = 268,
    s_generations: int = 10,
    knots: int = 6,
    knot_generations: int = 15,
    patience: int = 6,
    sigma: float = 0.3,
    population: int = 0,
    margin: float = 0.0,
) -> None:
    """An S for `s_generations`, `knots` for `knot_generations`, then single factors, within `evaluations`.

    evaluations: full evaluations (all documents) that the tokens spent come to, 268 being a fifth of the paper's
    1,344. patience: generations of knots without a better candidate, after which they are left. sigma: first step
    of the S's height, as a share of the logarithm of the largest factor; two thirds of that for knots, a third for
    single factors. population: candidates per generation; 0: CMA-ES's own, 4 + 3 ln(parameters). margin: standard
    errors by which a racing candidate must be worse to be dropped.
    """
    import numpy as np

    _cma()
    if sigma <= 0 or knots < 1:
        raise UsageError("strategy 'curve' needs at least one knot and a sigma above 0")
    evaluator, size, top = problem.evaluator, problem.space.size, problem.space.top
    evaluator.means(list(problem.seeds.values()))
    limit = min(evaluations * evaluator.full_cost(), evaluator.budget)
    # What choosing n-hat costs. A small budget is better spent on the factors: they matter more.
    choice = 2 * len(problem.space.start_tokens) * max(evaluator.sizes)
    choices = 0 if len(problem.space.start_tokens) == 1 or limit < 3 * choice else 1 if limit < 8 * choice else 2
    limit -= min(choices, 1) * choice
    descent = _Descent(problem, np.random.RandomState(problem.seed), limit, population, margin)
    start = fit_s_curve(evaluator.best.factors, top)
    descent.run(lambda p: s_curve(p, size, top), start, [sigma, sigma * size / 4, 2 * sigma], s_generations)
    if choices == 2:
        choose_start_tokens(evaluator)
    unit = max(math.log(top), problem.space.step)
    shapes, base = hats(min(knots, size), size), np.log(evaluator.best.factors)
    descent.run(
        lambda p: np.exp(base + np.asarray(p) @ shapes).tolist(),
        [0.0] * len(shapes),
        [sigma / 1.5 * unit] * len(shapes),
        knot_generations,
        patience,
    )
    descent.climb(sigma / 3 * unit)
    if choices:
        choose_start_tokens(evaluator)


@dataclass
class _Descent:
    """CMA-ES over points that become candidates. chance: its own generator; cma would take numpy's global one."""

    problem: Problem
    chance: np.random.RandomState
    limit: float
    population: int
    margin: float

    def run(
        self,
        decode: Callable[[Sequence[float]], Sequence[float]],
        start: Sequence[float],
        widths: Sequence[float],
        generations: int,
        patience: int = 1000,
    ) -> None:
        """Until `generations`, `patience` of them without a better candidate, the limit of tokens, or tiny steps.

        decode: a point to factors. start: the first mean; widths: each coordinate's first standard deviation.
        """
        evaluator, space = self.problem.evaluator, self.problem.space
        options: dict[str, Any] = {"verbose": -9, "randn": lambda *shape: self.chance.randn(*shape)}
        options |= {"seed": math.nan, "CMA_stds": list(widths), "tolx": 0.1 * space.step}
        if self.population:
            options["popsize"] = max(2, self.population)
        search = _cma().CMAEvolutionStrategy(list(start), 1.0, options)
        start_tokens, number, waited = evaluator.best.start_tokens, 0, 0
        while number < generations and waited < patience and not search.stop() and evaluator.tokens < self.limit:
            before = evaluator.best
            points = search.ask()
            made = [space.candidate(decode(point), start_tokens) for point in points]
            document = number % len(evaluator.sizes)
            losses = [row[0] for row in evaluator.losses(made, [document])]
            search.tell(points, losses)
            for i in sorted(range(len(made)), key=losses.__getitem__):
                if not race(evaluator, made[i], document, self.margin):
                    break
            number += 1
            waited = 0 if evaluator.best != before else waited + 1

    def climb(self, step: float, children: int = 4, share: float = 0.3) -> None:
        """An evolution strategy of one parent, the best candidate, until the limit of tokens.

        Each child moves a `share` of the logarithms by `step` times a normal number. The step grows by half after
        a generation that found a better candidate, and shrinks so that one such in five keeps it (Rechenberg's
        rule); from below the grid it starts again.
        """
        import numpy as np

        evaluator, space, first, number = self.problem.evaluator, self.problem.space, step, 0
        while evaluator.tokens < self.limit and number < 100 * len(evaluator.sizes) * space.size:
            best = evaluator.best
            moves = self.chance.randn(children, space.size) * (self.chance.rand(children, space.size) < share)
            moved = np.exp(np.log(best.factors) + step * moves).tolist()
            made = [space.candidate(factors, best.start_tokens) for factors in moved]
            document = number % len(evaluator.sizes)
            losses = [row[0] for row in evaluator.losses(made, [document])]
            better = 0
            for i in sorted(range(children), key=losses.__getitem__):
                better += made[i] != evaluator.best and race(evaluator, made[i], document, self.margin)
                if losses[i] >= evaluator.values[best][document]:
                    break
            step = step * 1.5 if better else step / 1.5**0.25
            step = first if step * math.log(space.top) < space.step / 4 else min(step, 2 * first)
            number += 1


def _cma() -> Any:
    try:
        import cma
    except ImportError as error:
        raise CtxextError("this strategy needs the package cma", hint="pip install 'ctxext[search]'") from error
    return cma


def hats(knots: int, size: int) -> np.ndarray:
    """[knots, size]: what a unit correction at each knot adds at each index; every column sums to 1."""
    import numpy as np

    places = np.linspace(0, 1, size)
    if knots == 1:
        return np.ones((1, size))
    return np.array([np.interp(places, np.linspace(0, 1, knots), unit) for unit in np.eye(knots)])


def s_curve(point: Sequence[float], size: int, top: float) -> list[float]:
    """Factors 1 -> exp(height * ln top) along an S in the logarithm: point is (height, centre, ln width).

    Centre and width are in frequencies. Rising from 1 to about the scale within a few frequencies is the shape of
    YaRN's ramp and of every published result of the search.
    """
    height, centre, width = point[0] * math.log(top), point[1], math.exp(min(point[2], 6))
    # Clamped: exp overflows long after the curve is flat.
    slopes = [max(-60.0, min(60.0, (centre - i) / width)) for i in range(size)]
    return [math.exp(height / (1 + math.exp(slope))) for slope in slopes]


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
