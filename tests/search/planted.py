"""A search problem with a known answer, no model: the loss is a bowl around a planted candidate."""

import contextlib
import math
import random

from ctxext.rope import Rope
from ctxext.search.evaluator import BudgetSpent, Evaluator, Problem
from ctxext.search.space import Space, seeds
from ctxext.search.strategies import constants, get

ROPE = Rope(10000.0, 32, 256)
FACTOR = 4.0
# A sigmoid in log space: none of the seeds is near.
PLANTED = [math.exp(1.3 / (1 + math.exp((6.5 - i) / 0.9))) for i in range(ROPE.size)]


class Planted:
    """measure(candidate, documents): the distance of logarithms to the plant, other offsets in each document."""

    def __init__(self, space, documents=4, start_tokens=8):
        self.space, self.start_tokens = space, start_tokens
        self.best = space.candidate(PLANTED, start_tokens)
        self.shifts = [random.Random(d).gauss(0, 0.02) for d in range(documents)]
        self.calls = 0

    def __call__(self, candidate, documents):
        self.calls += len(documents)
        far = sum((math.log(a) - math.log(b)) ** 2 for a, b in zip(candidate.factors, PLANTED, strict=True))
        wrong = 0.02 * abs(self.space.start_tokens.index(candidate.start_tokens) - 3)
        return [3 + d / 10 + far * (1 + self.shifts[d]) + wrong for d in documents]


def problem(seed=0, *, space=None, measure=None, documents=4, **more):
    space = space or Space(ROPE.size, FACTOR)
    measure = measure or Planted(space, documents)
    evaluator = Evaluator(space, measure, [1000] * documents, **more)
    return Problem(space, seeds(ROPE, FACTOR, space), evaluator, random.Random(seed), seed)


def run(name, seed=0, given=None, **more):
    """The evaluator after a whole search."""
    made = problem(seed, **more)
    with contextlib.suppress(BudgetSpent):
        get(name)(made, **constants(name, given or {}))
    return made.evaluator
