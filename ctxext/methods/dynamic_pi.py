"""Position interpolation by the scale that each position needs."""

from __future__ import annotations

from ..rope import Rope, Schedule
from . import pi
from ._stages import staged
from .registry import method


@method(title="Dynamic PI", paper="Peng et al. 2023, arXiv:2309.00071, section 3.3, made causal")
def dynamic_pi(rope: Rope, factor: float, *, granularity: int | None = None, temperature: float = 0.0) -> Schedule:
    """Position interpolation by exactly the scale that each position needs; the factor is the largest one.

    temperature c multiplies the logits of a stage of scale s by 1 + c ln s.
    """
    return staged(rope, factor, granularity, temperature, lambda s: pi.pi(rope, s).stages[0])
