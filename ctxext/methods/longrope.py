"""LongRoPE: each frequency divided by a factor of its own."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from .registry import method


def longrope_attention_scale(factor: float, trained_length: float) -> float:
    """What LongRoPE multiplies cos and sin by, sqrt(1 + ln s / ln L), as Phi-3 and transformers do."""
    return math.sqrt(1 + math.log(factor) / math.log(trained_length)) if factor > 1 else 1.0


@method(
    title="LongRoPE",
    paper="Ding et al. 2024, arXiv:2402.13753, eq. 3",
    needs=("long_factor",),
)
def longrope(
    rope: Rope,
    factor: float,
    *,
    long_factor: list[float] | None = None,
    short_factor: list[float] | None = None,
    start_tokens: int = 0,
    attention_factor: float | None = None,
    short_attention_factor: float = 1.0,
) -> Schedule:
    """Divide each frequency by a factor of its own, usually found by search.

    f'_i = f_i / long_factor_i; the first start_tokens positions keep the original angles. cos and sin
    are multiplied by attention_factor, by default sqrt(1 + ln s / ln L). With a short_factor list queries
    within the trained length use that instead, with short_attention_factor (all ones: the model as it was): two
    stages by the query's position, where transformers and servers switch by the length of the call.
    """
    assert long_factor is not None  # the registry has seen to it
    _check_factors(rope, "long_factor", long_factor)
    if attention_factor is None:
        attention_factor = longrope_attention_scale(factor, rope.trained_length)
    ratios = [1 / f for f in long_factor]
    long = static(rope, factor, ratios, attention_scale=attention_factor, start_tokens=start_tokens)
    if short_factor is None:
        return long
    _check_factors(rope, "short_factor", short_factor)
    # Short text keeps the logits scale that it was trained with; the sharpening is for the long stage.
    short = static(rope, factor, [1 / f for f in short_factor], attention_scale=short_attention_factor)
    stages = (short.stages[0], replace(long.stages[0], start=rope.trained_length))
    return replace(long, stages=stages)


def _check_factors(rope: Rope, name: str, factors: list[float]) -> None:
    if len(factors) != rope.size:
        raise UsageError(
            f"{name} has {len(factors)} values, the model has {rope.size} frequencies",
            hint=f"give one value per frequency: rotary dimension {rope.dim} / 2 = {rope.size}",
        )
    if any(f <= 0 for f in factors):
        raise UsageError(f"every value of {name} must be positive")
