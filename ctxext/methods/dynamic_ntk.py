"""NTK-aware scaling by the scale that each position needs."""

from __future__ import annotations

from ..errors import UsageError
from ..rope import Rope, Schedule, Stage
from . import ntk
from ._stages import staged
from .registry import method


@method(title="Dynamic NTK", paper="emozilla 2023; Peng et al. 2023, arXiv:2309.00071, section 3.3, made causal")
def dynamic_ntk(
    rope: Rope,
    factor: float,
    *,
    granularity: int | None = None,
    strength: float = 1.0,
    temperature: float = 0.0,
) -> Schedule:
    """NTK-aware scaling by the scale that each position needs; the factor is the largest one.

    The base at scale s is theta (strength s - (strength - 1))^(d/(d-2)): strength 1 is the paper's, other
    values are what transformers calls the factor of its dynamic type. temperature c multiplies the
    logits of a stage of scale s by 1 + c ln s.
    """
    if strength < 1:
        raise UsageError(f"strength must be at least 1, got {strength}")

    def make(scale: float) -> Stage:
        return ntk.ntk(rope, strength * scale - (strength - 1)).stages[0]

    return staged(rope, factor, granularity, temperature, make)
