"""Random search: the control that any search must beat."""

from __future__ import annotations

from ..evaluator import Problem
from . import strategy


@strategy
def random(problem: Problem, *, candidates: int = 1341) -> None:
    """The seeds, then `candidates` drawn evenly from the whole space, each on all documents."""
    problem.evaluator.means(list(problem.seeds.values()))
    for _ in range(candidates):
        problem.evaluator.means([problem.space.any(problem.rng)])
