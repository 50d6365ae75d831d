"""YaRN by the scale that each position needs."""

from __future__ import annotations

from ..rope import Rope, Schedule, Stage
from . import yarn
from ._stages import staged
from .registry import method


@method(title="Dynamic YaRN", paper="Peng et al. 2023, arXiv:2309.00071, section 3.3 and 3.4, made causal")
def dynamic_yarn(
    rope: Rope,
    factor: float,
    *,
    granularity: int | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention: bool = True,
    temperature: float = 0.0,
) -> Schedule:
    """YaRN by the scale that each position needs; the factor is the largest one.

    attention=False leaves out YaRN's own sharpening, 0.1 ln s + 1 on cos and sin. temperature c multiplies
    the logits of a stage of scale s by 1 + c ln s.
    """

    def make(scale: float) -> Stage:
        sharp = None if attention else 1.0
        made = yarn.yarn(
            rope, scale, beta_fast=beta_fast, beta_slow=beta_slow, truncate=truncate, attention_factor=sharp
        )
        return made.stages[0]

    return staged(rope, factor, granularity, temperature, make)
