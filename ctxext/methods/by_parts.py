"""Treat each frequency by how many turns it made in training: keep the fast, interpolate the slow."""

from __future__ import annotations

import math

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from . import method


def _clamp(x: float) -> float:
    return min(1.0, max(0.0, x))


def _ordered(low: float, high: float, low_name: str, high_name: str) -> None:
    if not 0 < low < high:
        raise UsageError(f"need 0 < {low_name} < {high_name}, got {low_name}={low}, {high_name}={high}")


@method(title="NTK-by-parts", paper="Peng et al. 2023, arXiv:2309.00071, eq. 17-19")
def ntk_by_parts(rope: Rope, factor: float, *, alpha: float = 1.0, beta: float = 32.0) -> Schedule:
    """Interpolate frequencies that made fewer than alpha turns, keep those above beta, blend between.

    With r = L f / 2pi turns over the trained length, gamma = clamp((r - alpha) / (beta - alpha), 0, 1)
    and f' = (1 - gamma) f/s + gamma f. The ramp is linear in turns, as in the paper; the YaRN code's ramp
    is linear in the dimension.
    """
    _ordered(alpha, beta, "alpha", "beta")
    keep = [_clamp((r - alpha) / (beta - alpha)) for r in rope.turns()]
    return static(rope, factor, [(1 - g) / factor + g for g in keep])


def yarn_attention_scale(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cos and sin by, 0.1 ln s + 1 (eq. 22). weight: of the logarithm, DeepSeek's mscale."""
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
    _ordered(beta_slow, beta_fast, "beta_slow", "beta_fast")

    def dimension(turns: float) -> float:
        return rope.dim * math.log(rope.trained_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    # The width guard is part of the reference code: without it equal ends divide by zero.
    width = high - low if high != low else 0.001
    interpolate = [_clamp((i - low) / width) for i in range(rope.size)]

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


@method(title="Llama 3 scaling", paper="Llama 3.1 reference code (Meta 2024), apply_scaling")
def llama3(rope: Rope, factor: float, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0) -> Schedule:
    """Divide frequencies that made few turns in training, keep those that made many, blend between.

    Few is less than low_freq_factor, many more than high_freq_factor turns over the trained length; the
    blend is linear in turns, (r - low) / (high - low). Unlike YaRN it doesn't sharpen attention.
    """
    _ordered(low_freq_factor, high_freq_factor, "low_freq_factor", "high_freq_factor")
    keep = [_clamp((r - low_freq_factor) / (high_freq_factor - low_freq_factor)) for r in rope.turns()]
    native = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": rope.trained_length,
    }
    return static(rope, factor, [(1 - g) / factor + g for g in keep], native=native)
