"""LongRoPE's evolutionary search (Ding et al. 2024, arXiv:2402.13753, algorithm 1 and section 3.2)."""

from __future__ import annotations

import random
from collections.abc import Iterable

from ...errors import UsageError
from ..evaluator import Problem
from ..space import Candidate, Space
from . import strategy


@strategy
def evolution(
    problem: Problem,
    *,
    population: int = 64,
    iterations: int = 40,
    parents: int = 32,
    mutations: int = 16,
    crossovers: int = 16,
    probability: float = 0.3,
    tries: int = 20,
) -> None:
    """Keep the best `parents`, add mutants and crossings of them, evaluate, repeat.

    The first population is the seeds and mutants of them. A mutation draws each factor anew with `probability`,
    between its neighbours; n-hat likewise. A crossing takes each factor of a second parent with `probability`
    where the list stays monotone. What was met before is drawn again, up to `tries` times.
    """
    if probability > 1 or parents < 1:
        raise UsageError("evolution needs a probability of at most 1 and at least one parent")
    space, rng, evaluator = problem.space, problem.rng, problem.evaluator
    seeds = list(dict.fromkeys(problem.seeds.values()))
    known = set(seeds)

    def fresh(make, count: int) -> Iterable[Candidate]:
        for _ in range(count):
            child = make()
            for _ in range(tries - 1):
                if child not in known:
                    break
                child = make()
            known.add(child)
            yield child

    first = seeds + list(
        fresh(lambda: mutate(space, rng, rng.choice(seeds), probability), population - len(seeds))
    )
    ranked = _rank(evaluator, first)
    for _ in range(iterations):
        elite = ranked[:parents]
        children = list(fresh(lambda: mutate(space, rng, rng.choice(elite), probability), mutations))  # noqa: B023
        children += fresh(lambda: _cross_or_mutate(space, rng, elite, probability, tries), crossovers)  # noqa: B023
        ranked = _rank(evaluator, list(dict.fromkeys(elite + children)))


def _rank(evaluator, candidates: list[Candidate]) -> list[Candidate]:
    """Best first; among equals the one that came first."""
    losses = dict(zip(candidates, evaluator.means(candidates), strict=True))
    return sorted(candidates, key=losses.__getitem__)


def mutate(space: Space, rng: random.Random, parent: Candidate, probability: float) -> Candidate:
    """Each factor is drawn anew with `probability` from what lies between its neighbours, n-hat from its list."""
    factors = list(parent.factors)
    for i in range(space.size):
        if rng.random() < probability:
            low = factors[i - 1] if i else 1.0
            high = factors[i + 1] if i + 1 < space.size else space.top
            factors[i] = space.between(rng, i, low, high)
    start_tokens = rng.choice(space.start_tokens) if rng.random() < probability else parent.start_tokens
    return Candidate(tuple(factors), start_tokens)


def cross(space: Space, rng: random.Random, one: Candidate, other: Candidate, probability: float) -> Candidate:
    """`one` with each factor of `other` taken with `probability`, unless the list would fall somewhere."""
    factors = list(one.factors)
    for i in range(space.size):
        if rng.random() < probability:
            low = factors[i - 1] if i else 1.0
            high = factors[i + 1] if i + 1 < space.size else space.top
            if low <= other.factors[i] <= high:
                factors[i] = other.factors[i]
    start_tokens = other.start_tokens if rng.random() < probability else one.start_tokens
    return Candidate(tuple(factors), start_tokens)


def _cross_or_mutate(
    space: Space, rng: random.Random, elite: list[Candidate], probability: float, tries: int
) -> Candidate:
    for _ in range(max(1, tries) if len(elite) > 1 else 0):
        one, other = rng.sample(elite, 2)
        child = cross(space, rng, one, other, probability)
        if child not in (one, other):
            return child
    return mutate(space, rng, rng.choice(elite), probability)
