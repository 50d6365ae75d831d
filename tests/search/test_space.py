"""The search space: every operator stays inside it, and it holds what is published."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxext import methods
from ctxext.errors import UsageError
from ctxext.rope import Rope
from ctxext.search.space import (
    START_TOKENS,
    Candidate,
    Space,
    critical_floors,
    critical_frequency,
    factors_of,
    seeds,
)
from ctxext.search.strategies.evolution import cross, mutate

# LongRoPE's published factors of LLaMA2-7B at 128k, s = 32 (the authors' repository, ft_la2_128k.csv).
PUBLISHED = [1.0] * 19
PUBLISHED += [1.01, 1.06, 1.2, 1.4, 1.69, 1.94, 2.14, 2.5, 2.84, 3.06, 3.55, 3.78, 3.95, 5.18, 5.26, 6.38, 6.66]
PUBLISHED += [7.42, 8, 11.75, 17.29, 18.37, 25.72, 28.49, 29.16]
PUBLISHED += [32.0] * 20


@st.composite
def spaces(draw):
    size = draw(st.integers(1, 24))
    factor = draw(st.floats(1, 64))
    floors = ()
    if draw(st.booleans()):
        floors = critical_floors(size, factor, draw(st.integers(0, size)))
    allowed = tuple(draw(st.sets(st.sampled_from(START_TOKENS), min_size=1)))
    return Space(size, factor, 1.25, draw(st.sampled_from([0.01, 0.05, 0.25])), allowed, floors)


def breaks(space, candidate):
    """The constraints, written apart from the code under test."""
    factors = candidate.factors
    assert len(factors) == space.size
    assert all(1 <= f <= max(1.0, 1.25 * space.factor) + 1e-9 for f in factors)
    assert all(f >= floor - 1e-9 or f == space.top for f, floor in zip(factors, space.floors, strict=True))
    assert all(a <= b for a, b in pairwise(factors))
    assert all(abs((f - 1) / space.step - round((f - 1) / space.step)) < 1e-6 for f in factors)
    assert candidate.start_tokens in space.start_tokens
    return space.violation(candidate)


@settings(max_examples=150, deadline=None)
@given(spaces(), st.integers(0, 10**6), st.floats(0, 1))
def test_operators_stay_inside(space, seed, probability):
    rng = random.Random(seed)
    one, other = space.any(rng), space.any(rng)
    for _ in range(4):
        assert breaks(space, one) is None
        child = mutate(space, rng, one, probability)
        assert breaks(space, child) is None
        crossed = cross(space, rng, child, other, probability)
        assert breaks(space, crossed) is None
        assert all(f in (a, b) for f, a, b in zip(crossed.factors, child.factors, other.factors, strict=True))
        one, other = child, crossed


@settings(max_examples=100, deadline=None)
@given(spaces(), st.data())
def test_any_list_becomes_a_candidate(space, data):
    wild = data.draw(st.lists(st.floats(0.01, 100), min_size=space.size, max_size=space.size))
    made = space.candidate(wild, data.draw(st.integers(0, 300)))
    assert breaks(space, made) is None
    assert space.candidate(made.factors, made.start_tokens) == made
    assert space.candidate([math.inf] * space.size).factors == (space.top,) * space.size


def test_published_factors_are_a_candidate():
    space = Space(64, 32.0)
    made = space.candidate(PUBLISHED)
    assert list(made.factors) == PUBLISHED
    assert space.violation(made) is None


@pytest.mark.parametrize(
    ("factors", "start_tokens", "message"),
    [
        ([1.0, 2.0, 1.5], 0, "fall"),
        ([1.0, 1.0, 2.51], 0, "outside"),
        ([0.99, 1.0, 1.0], 0, "outside"),
        ([1.0, 1.0, 1.005], 0, "off the grid"),
        ([1.0, 1.0, 1.0], 3, "start_tokens"),
        ([1.0, 1.0], 0, "2 factors"),
    ],
)
def test_violations_are_named(factors, start_tokens, message):
    assert message in Space(3, 2.0).violation(Candidate(tuple(factors), start_tokens))


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 0},
        {"step": -1},
        {"start_tokens": ()},
        {"start_tokens": (-1,)},
        {"floors": (1.0,)},
        {"floors": (1.0, 0.5, 1.0)},
        {"upper": 1.0, "floors": (1.0, 1.0, 2.5)},
    ],
)
def test_impossible_spaces_are_refused(wrong):
    with pytest.raises(UsageError):
        Space(3, 2.0, **wrong)


def test_mutation_and_crossing_do_something():
    space, rng = Space(16, 4.0), random.Random(0)
    parent = space.candidate([1 + i / 5 for i in range(16)])
    assert mutate(space, rng, parent, 0.0) == parent
    changed = [sum(a != b for a, b in zip(mutate(space, rng, parent, 0.3).factors, parent.factors, strict=True))]
    for _ in range(200):
        child = mutate(space, rng, parent, 0.3)
        changed.append(sum(a != b for a, b in zip(child.factors, parent.factors, strict=True)))
    # Each of 16 factors is drawn anew with probability 0.3; some draws give the old value again.
    assert 3.5 < sum(changed) / len(changed) < 5.0
    other = space.any(rng)
    assert cross(space, rng, parent, other, 0.0) == parent


def test_seeds_are_the_formulas():
    """PI, NTK (eq. 16) and YaRN (eq. 17-20) written out once more, to the nearest grid point."""
    rope, factor = Rope(10000.0, 32, 256), 4.0
    space = Space(16, factor)
    found = seeds(rope, factor, space)
    assert found["pi"].factors == (4.0,) * 16
    ntk = [factor ** (2 * i / (32 - 2)) for i in range(16)]
    assert found["ntk"].factors == pytest.approx(ntk, abs=0.0051)

    def dimension(turns):
        return 32 * math.log(256 / (turns * 2 * math.pi)) / (2 * math.log(10000))

    low, high = max(math.floor(dimension(32)), 0), math.ceil(dimension(1))
    ramps = [min(1, max(0, (i - low) / (high - low))) for i in range(16)]
    yarn = [1 / ((1 - r) + r / factor) for r in ramps]
    assert found["yarn"].factors == pytest.approx(yarn, abs=0.0051)
    assert {c.start_tokens for c in found.values()} == {0}


def test_progressive_seeds_multiply():
    rope = Rope(10000.0, 32, 256)
    first = [1.0] * 6 + [2.0] * 10
    previous = methods.schedule(rope, "longrope", 2, long_factor=first, start_tokens=4)
    assert factors_of(previous) == pytest.approx(first)
    found = seeds(rope, 8, Space(16, 8.0), previous)
    assert found["previous"].factors == pytest.approx(first)
    assert found["previous, pi"].factors == pytest.approx([4.0] * 6 + [8.0] * 10)
    assert found["previous"].start_tokens == 4
    assert found["pi"].start_tokens == 0


def test_critical_frequency():
    """theta^(2i/d) * 2 pi > L: 10000^(i/16) > 256 / 2 pi, i > 6.44."""
    rope = Rope(10000.0, 32, 256)
    assert critical_frequency(rope) == 7
    assert critical_frequency(Rope(500000.0, 128, 8192)) == 35  # LongRoPE2, table 1: LLaMA3-8B, d_tcd = 70
    floors = critical_floors(16, 4.0, 7)
    made = Space(16, 4.0, floors=floors).candidate([1.0] * 16)
    assert made.factors == (1.0,) * 7 + (4.0,) * 9
    with pytest.raises(UsageError, match=r"0\.\.16"):
        critical_floors(16, 4.0, 17)
