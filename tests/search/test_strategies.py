"""Strategies on a planted optimum: found, never worse than the seeds, the same again after a kill."""

import json
import math
import random

import numpy as np
import pytest
from planted import FACTOR, PLANTED, ROPE, Planted, problem, run

from ctxext.errors import CtxextError, UsageError
from ctxext.search.evaluator import BudgetSpent, Evaluator, Problem
from ctxext.search.log import Log
from ctxext.search.space import Candidate, Space, critical_floors
from ctxext.search.strategies import all_strategies, constants, curve, get

SMALL = {
    "evolution": {"population": 12, "iterations": 6, "parents": 6, "mutations": 4, "crossovers": 4},
    "curve": {"evaluations": 25},
    "random": {"candidates": 20},
}


def trace(evaluator):
    return evaluator.tokens, evaluator.history, list(evaluator.values.items())


def test_all_strategies_are_tested():
    assert set(SMALL) == set(all_strategies())


def test_paper_constants_are_the_defaults():
    """Population 64, 40 iterations of 16 + 16, top 32, p = 0.3: 64 + 40 * 32 evaluations."""
    evaluator = run("evolution", documents=1)
    known = {"population": 64, "iterations": 40, "parents": 32, "mutations": 16, "crossovers": 16}
    assert constants("evolution").items() >= (known | {"probability": 0.3}).items()
    assert len(evaluator.values) == 64 + 40 * 32
    assert evaluator.tokens == 1000 * 1344


@pytest.mark.parametrize(("name", "near", "left"), [("evolution", 0.2, 0.15), ("curve", 0.1, 0.03)])
def test_planted_optimum_is_recovered(name, near, left):
    """Each factor to within `near`, and no more than `left` of the best seed's distance to the optimum."""
    evaluator = run(name)
    best = evaluator.best
    assert best.factors == pytest.approx(PLANTED, rel=near)
    assert evaluator.space.start_tokens.index(best.start_tokens) == pytest.approx(3, abs=1)
    plant = Planted(evaluator.space)
    floor = sum(plant(plant.best, range(4))) / 4
    seed = min(sum(plant(c, range(4))) / 4 for c in problem().seeds.values())
    assert evaluator.best_loss - floor < left * (seed - floor)


def test_curve_needs_a_tenth_of_evolution():
    """On the plant; how it is on models is measured by experiments/benchmarks/search.py."""
    paper = run("evolution")
    cheap = run("curve", given={"evaluations": 134})
    assert cheap.tokens <= paper.tokens / 9.9
    assert cheap.best_loss <= paper.best_loss


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("seed", [0, 1])
def test_best_only_improves_and_beats_every_seed(name, seed):
    evaluator = run(name, seed, SMALL[name])
    losses = [loss for _, loss in evaluator.history]
    assert losses == sorted(losses, reverse=True)
    full = [v for v in evaluator.values.values() if len(v) == 4]
    assert evaluator.best_loss == min(sum(v.values()) / 4 for v in full)
    for seed_candidate in problem().seeds.values():
        assert evaluator.best_loss <= sum(evaluator.values[seed_candidate].values()) / 4
    assert all(evaluator.space.violation(c) is None for c in evaluator.values)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_constraints_of_longrope2_hold(name):
    space = Space(ROPE.size, FACTOR, start_tokens=(0, 4), floors=critical_floors(ROPE.size, FACTOR, 7))
    evaluator = run(name, 0, SMALL[name], space=space, measure=lambda c, ds: [sum(c.factors) for _ in ds])
    assert len(evaluator.values) > 10
    assert all(min(c.factors[7:]) >= FACTOR for c in evaluator.values)
    assert {c.start_tokens for c in evaluator.values} <= {0, 4}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_same_seed_same_trace_another_seed_another(name):
    one, again, other = (run(name, seed, SMALL[name]) for seed in (3, 3, 4))
    assert trace(one) == trace(again)
    assert list(one.values) != list(other.values)
    # Nobody else's chance takes part.
    np.random.seed(5)
    assert trace(run(name, 3, SMALL[name])) == trace(one)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_killed_anywhere_and_resumed_is_uninterrupted(name, tmp_path):
    path = tmp_path / "log.jsonl"
    whole = run(name, 1, SMALL[name], log=Log.begin(path, {}, resume=False))
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in (1, 2, 5, len(lines) // 2, len(lines) - 1, len(lines)):
        path.write_bytes(b"".join(lines[:cut]) + b'{"phase": "lo')
        plant = Planted(Space(ROPE.size, FACTOR))
        resumed = run(name, 1, SMALL[name], log=Log.begin(path, {}, resume=True), measure=plant)
        assert path.read_bytes() == b"".join(lines)
        assert trace(resumed) == trace(whole)
        assert plant.calls == sum(len(json.loads(line)["documents"]) for line in lines[cut:])


@pytest.mark.parametrize("name", sorted(SMALL))
def test_tokens_are_what_was_read_and_stay_within_the_budget(name):
    space = Space(ROPE.size, FACTOR)
    plant = Planted(space)
    evaluator = run(name, 0, SMALL[name], space=space, measure=plant, budget=15500)
    assert evaluator.tokens == plant.calls * 1000 <= 15500
    assert evaluator.tokens > 11000


def test_nothing_is_measured_twice():
    made = problem()
    a, b = list(made.seeds.values())[:2]
    made.evaluator.losses([a, a], [0])
    made.evaluator.means([a, b, a])
    assert made.evaluator.measure.calls == 8
    assert made.evaluator.best is min((a, b), key=lambda c: made.evaluator.means([c]))


def test_racing_drops_early():
    """A worse candidate is read on one document more, a better one on all."""
    made = problem()
    evaluator = made.evaluator
    evaluator.means(list(made.seeds.values()))
    plant = evaluator.measure
    before = plant.calls
    bad = made.space.candidate([5.0] * 16)
    assert not curve.race(evaluator, bad, 2)
    assert plant.calls == before + 1
    assert curve.race(evaluator, plant.best, 2)
    assert plant.calls == before + 5
    assert evaluator.best == plant.best


def test_paired_differences():
    assert curve.worse([0.1], 0.0)
    assert not curve.worse([-0.1], 0.0)
    assert not curve.worse([0.1, -0.2], 0.0)
    assert curve.worse([0.1, -0.05], 0.0)
    # mean 0.025, standard error 0.075
    assert not curve.worse([0.1, -0.05], 1.0)
    assert curve.worse([0.5, 0.6, 0.55], 2.0)


@pytest.mark.parametrize("count", [1, 10, 32, 200])
def test_survey_is_spread_evenly(count):
    """Inside the ranges, in each corner of them if there are enough, and all are S curves that rise."""
    points = np.array(curve.spread(count, 16))
    low, high = np.array([0.6, 0, math.log(0.16)]), np.array([1, 16, math.log(4.8)])
    assert (points >= low).all()
    assert (points <= high).all()
    if count >= 32:
        halves = {tuple(row) for row in ((points - low) / (high - low) > 0.5).tolist()}
        assert len(halves) == 8
    for point in points:
        factors = curve.s_curve(point, 16, 10.0)
        assert factors == sorted(factors)
        assert 1 <= factors[0] <= factors[-1] <= 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_what_is_no_number_stops_the_search(name, value, tmp_path):
    space = Space(ROPE.size, FACTOR)
    plant = Planted(space)

    def measure(candidate, documents):
        return [value if plant.calls > 14 else loss for loss in plant(candidate, documents)]

    path = tmp_path / "log.jsonl"
    with pytest.raises(CtxextError, match="finite"):
        run(name, 0, SMALL[name], space=space, measure=measure, log=Log.begin(path, {}, resume=False))
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()


def test_a_candidate_outside_the_space_is_never_measured():
    space = Space(3, 2.0)
    evaluator = Evaluator(space, lambda c, d: pytest.fail("measured"), [10])
    with pytest.raises(CtxextError, match="outside its space"):
        evaluator.losses([Candidate((1.0, 2.0, 1.5))])


def test_budget_below_the_first_candidate():
    made = problem(budget=100)
    with pytest.raises(BudgetSpent):
        get("curve")(made)
    assert made.evaluator.history == []
    with pytest.raises(CtxextError, match="no candidate"):
        _ = made.evaluator.best


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("evolutoin", {}, "evolution"),
        ("evolution", {"populatoin": 3}, "population"),
        ("evolution", {"population": 2.5}, "whole number"),
        ("evolution", {"population": -1}, "from 0"),
        ("evolution", {"probability": "high"}, "a number"),
        ("evolution", {"probability": math.nan}, "a number"),
        ("random", {"candidates": True}, "whole number"),
    ],
)
def test_wrong_constants(name, given, message):
    with pytest.raises(UsageError) as error:
        constants(name, given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("evolution", {"probability": 2}),
        ("evolution", {"parents": 0}),
        ("curve", {"sigma": 0}),
        ("curve", {"fastest": 0}),
        ("curve", {"population": 1}),
    ],
)
def test_constants_that_cannot_work(name, given):
    with pytest.raises(UsageError):
        run(name, 0, given)


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize(("size", "factor"), [(1, 4.0), (3, 1.0)])
def test_one_frequency_or_scale_one(name, size, factor):
    """The smallest problems: hardly anything to search is no error."""
    space = Space(size, factor, start_tokens=(0,))
    evaluator = Evaluator(space, lambda c, ds: [sum(c.factors)] * len(ds), [10, 10])
    start = {"one": space.candidate([2.0] * size)}
    get(name)(Problem(space, start, evaluator, random.Random(0), 0), **constants(name, SMALL[name]))
    assert evaluator.best.factors == pytest.approx((1.0,) * size, abs=0.25)


@pytest.mark.parametrize(("evaluations", "choices"), [(10, 0), (25, 1), (80, 2)])
def test_curve_chooses_start_tokens_if_there_are_tokens_for_it(evaluations, choices, monkeypatch):
    """14 values on 4 documents cost about 28 readings, 7 full evaluations."""
    calls = []
    real = curve.choose_start_tokens
    monkeypatch.setattr(curve, "choose_start_tokens", lambda evaluator: (calls.append(1), real(evaluator)))
    evaluator = run("curve", 0, {"evaluations": evaluations})
    assert len(calls) == choices
    assert evaluator.tokens <= 1.1 * evaluations * 4000
    assert (len({c.start_tokens for c in evaluator.values}) > 1) == (choices > 0)
    # Even the smallest budget finds something better than the seeds.
    assert evaluator.best not in problem().seeds.values()
