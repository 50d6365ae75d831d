"""YaRN: NTK-by-parts with a ramp over dimensions, and sharper attention."""

from __future__ import annotations

import math

from ..rope import Rope, Schedule, static
from ._turns import check_ordered, clamp
from .registry import method


def yarn_attention_scale(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cos and sin by at scale s: 0.1 w ln s + 1 (eq. 22; w is DeepSeek's mscale)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


@method(title="YaRN", paper="Peng et al. 2023, arXiv:2309.00071, eq. 20-22 and its reference code")
def yarn(
    rope: Rope,
    factor: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> Schedule:
    """NTK-by-parts with a ramp over dimensions, and sharper attention: the usual choice without training.

    The ramp runs between the dimensions that make beta_fast and beta_slow turns in training,
    d ln(L / 2pi b) / (2 ln theta), rounded outwards if `truncate`. cos and sin are multiplied by
    attention_factor, by default 0.1 ln s + 1, or with both mscale values
    (0.1 mscale ln s + 1) / (0.1 mscale_all_dim ln s + 1) as DeepSeek uses it.
    """
    check_ordered(beta_slow, beta_fast, "beta_slow", "beta_fast")

    def dimension(turns: float) -> float:
        return rope.dim * math.log(rope.trained_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    # The width guard is part of the reference code: without it equal ends divide by zero.
    width = high - low if high != low else 0.001
    interpolate = [clamp((i - low) / width) for i in range(rope.size)]

    if attention_factor is not None:
        scale = attention_factor
    elif mscale and mscale_all_dim:
        scale = yarn_attention_scale(factor, mscale) / yarn_attention_scale(factor, mscale_all_dim)
    else:
        scale = yarn_attention_scale(factor)
    native = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": rope.trained_length,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
        "attention_factor": scale,
    }
    if mscale and mscale_all_dim:
        native |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    ratios = [(1 - m) + m / factor for m in interpolate]
    return static(rope, factor, ratios, attention_scale=scale, native=native)
