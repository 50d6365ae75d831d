"""Raise the base: fast frequencies stay, slow ones are slowed down more and more."""

from __future__ import annotations

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from .registry import method


def rebased(rope: Rope, factor: float, theta: float) -> Schedule:
    """Frequencies theta'^(-2i/d) as ratios (theta/theta')^(2i/d) of the old ones."""
    ratios = [(rope.theta / theta) ** (2 * i / rope.dim) for i in range(rope.size)]
    return static(rope, factor, ratios, native={"rope_type": "default", "rope_theta": theta})


@method(title="NTK-aware scaling", paper="bloc97 2023; Peng et al. 2023, arXiv:2309.00071, eq. 16")
def ntk(rope: Rope, factor: float) -> Schedule:
    """Raise the base so that the slowest frequency is divided by the factor and the fastest is kept.

    theta' = theta * s^(d/(d-2)). Works without training up to small factors; it is a changed rope_theta,
    which every runtime reads.
    """
    if rope.dim < 4:
        raise UsageError(f"NTK-aware scaling needs at least 2 frequencies, the model has {rope.size}")
    return rebased(rope, factor, rope.theta * factor ** (rope.dim / (rope.dim - 2)))
