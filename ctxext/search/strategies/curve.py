"""A cheaper search for the same space: corrections of a good seed along few knots, CMA-ES, racing over documents.

What makes it cheaper than evolution over single factors:

- The loss hardly changes between neighbouring factors' values, so a correction is a curve through a few knots over
  the frequencies' index, added to the logarithm of the best candidate so far. Later stages have more knots.
- CMA-ES (Hansen 2016, arXiv:1604.00772; the package `cma`) learns which corrections go together.
- It needs only the order within a generation, and differences between candidates on one document are nearly those
  on another: so a generation is read on one document, the next generation on the next one.
- A candidate that beats the best one on that document races it over the others, and is dropped as soon as the
  paired differences on the documents seen say that it's worse. Only what survives all becomes the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    evaluations: int = 134,
    knots: int = 6,
    generations: int = 25,
    sigma: float = 0.3,
    population: int = 0,
    margin: float = 0.0,
) -> None:
    """Search with `knots` for `generations`, then with a knot per frequency until `evaluations` are spent.

    evaluations: full evaluations (all documents) that the tokens spent come to, 134 being a tenth of the paper's
    1,344. sigma: first step as a share of the logarithm of the largest factor; halved for the second stage.
    population: candidates per generation; 0: CMA-ES's own, 4 + 3 ln(parameters). margin: standard errors by which
    a racing candidate must be worse to be dropped.
    """
    evaluator, space = problem.evaluator, problem.space
    limit = min(evaluations * evaluator.full_cost(), evaluator.budget)
    evaluator.means(list(problem.seeds.values()))
    chance = _chance(problem.seed)
    # The last choice of n-hat is worth keeping some tokens for.
    kept = 0.0 if len(space.start_tokens) == 1 else 2 * len(space.start_tokens) * max(evaluator.sizes)
    stages = [(min(knots, space.size), sigma, generations), (space.size, sigma / 2, math.inf)]
    for number, (count, width, most) in enumerate(stages):
        _descend(problem, chance, count, width, most, limit - kept, population, margin)
        if number == 0 or len(stages) == 1:
            choose_start_tokens(evaluator)
    choose_start_tokens(evaluator)


def _chance(seed: int):
    import numpy as np

    # Its own generator: cma draws from numpy's global one otherwise.
    return np.random.RandomState(seed)


def hats(knots: int, size: int) -> np.ndarray:
    """[knots, size]: what a unit correction at each knot adds at each index; every column sums to 1."""
    import numpy as np

    places = np.linspace(0, 1, size)
    if knots == 1:
        return np.ones((1, size))
    return np.array([np.interp(places, np.linspace(0, 1, knots), unit) for unit in np.eye(knots)])


def _descend(
    problem: Problem,
    chance,
    knots: int,
    sigma: float,
    generations: float,
    limit: float,
    population: int,
    margin: float,
) -> None:
    """CMA-ES around the best candidate, until `generations`, `limit` tokens, or its steps are below the grid."""
    import numpy as np

    try:
        import cma
    except ImportError as error:
        raise CtxextError("this strategy needs the package cma", hint="pip install 'ctxext[search]'") from error
    evaluator, space = problem.evaluator, problem.space
    if sigma <= 0 or knots < 1:
        raise UsageError("strategy 'curve' needs at least one knot and a sigma above 0")
    base, shapes = evaluator.best, hats(knots, space.size)
    start = np.log(base.factors)
    smallest = space.step / space.top
    options = {"verbose": -9, "randn": lambda *shape: chance.randn(*shape), "seed": np.nan, "tolx": smallest}
    if population:
        options["popsize"] = max(2, population)
    scale = max(math.log(space.top), smallest)
    search = cma.CMAEvolutionStrategy([0.0] * knots, sigma * scale, options)
    number = 0
    while number < generations and not search.stop() and evaluator.tokens < limit:
        points = search.ask()
        made = [space.candidate(np.exp(start + point @ shapes).tolist(), base.start_tokens) for point in points]
        document = number % len(evaluator.sizes)
        losses = [row[0] for row in evaluator.losses(made, [document])]
        search.tell(points, losses)
        for i in sorted(range(len(made)), key=losses.__getitem__):
            if not race(evaluator, made[i], document, margin):
                break
        number += 1


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
