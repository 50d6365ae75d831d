"""Written by python -m experiments.stubs."""

from collections.abc import Mapping
from typing import Any, Literal, overload

from ..config.read import Existing as Existing
from ..rope import Schedule as Schedule
from . import Foreign as Foreign

@overload
def patch(
    model: Foreign,
    method: Literal["alibi"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
) -> Schedule:
    """Subtract a slope times the distance from the logits, another slope in each head; no rotation."""

@overload
def patch(
    model: Foreign,
    method: Literal["drope"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    temperature: float = ...,
) -> Schedule:
    """Drop RoPE from a trained model, recalibrate at the original length, sharpen attention beyond it."""

@overload
def patch(
    model: Foreign,
    method: Literal["dual_chunk"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    chunk: int | None = ...,
    window: int | None = ...,
) -> Schedule:
    """Cut the text into chunks: exact distances within one and to the end of the one before, the largest beyond."""

@overload
def patch(
    model: Foreign,
    method: Literal["dynamic_ntk"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    granularity: int | None = ...,
    strength: float = ...,
    temperature: float = ...,
) -> Schedule:
    """NTK-aware scaling by the scale that each position needs; the factor is the largest one."""

@overload
def patch(
    model: Foreign,
    method: Literal["dynamic_pi"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    granularity: int | None = ...,
    temperature: float = ...,
) -> Schedule:
    """Position interpolation by exactly the scale that each position needs; the factor is the largest one."""

@overload
def patch(
    model: Foreign,
    method: Literal["dynamic_yarn"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    granularity: int | None = ...,
    beta_fast: float = ...,
    beta_slow: float = ...,
    truncate: bool = ...,
    attention: bool = ...,
    temperature: float = ...,
) -> Schedule:
    """YaRN by the scale that each position needs; the factor is the largest one."""

@overload
def patch(
    model: Foreign,
    method: Literal["llama3"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    low_freq_factor: float = ...,
    high_freq_factor: float = ...,
) -> Schedule:
    """Divide frequencies that made few turns in training, keep those that made many, blend between."""

@overload
def patch(
    model: Foreign,
    method: Literal["longrope"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    long_factor: list[float] | None = ...,
    short_factor: list[float] | None = ...,
    start_tokens: int = ...,
    attention_factor: float | None = ...,
    short_attention_factor: float = ...,
) -> Schedule:
    """Divide each frequency by a factor of its own, usually found by search."""

@overload
def patch(
    model: Foreign,
    method: Literal["nope"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    layers: list[int] | None = ...,
    every: int | None = ...,
) -> Schedule:
    """Stop all rotation: no position encoding but the causal mask; or stop it in some layers only."""

@overload
def patch(
    model: Foreign,
    method: Literal["ntk"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
) -> Schedule:
    """Raise the base so that the slowest frequency is divided by the factor and the fastest is kept."""

@overload
def patch(
    model: Foreign,
    method: Literal["ntk_by_parts"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    alpha: float = ...,
    beta: float = ...,
) -> Schedule:
    """Interpolate frequencies that made fewer than alpha turns, keep those above beta, blend between."""

@overload
def patch(
    model: Foreign,
    method: Literal["pi"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
) -> Schedule:
    """Divide every frequency by the factor, so that positions fill the trained range more densely."""

@overload
def patch(
    model: Foreign,
    method: Literal["rerope"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    window: int | None = ...,
    step: float | None = ...,
) -> Schedule:
    """Exact distances up to a window, and that same distance for every key beyond."""

@overload
def patch(
    model: Foreign,
    method: Literal["self_extend"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    window: int | None = ...,
    group: int | None = ...,
) -> Schedule:
    """Exact distances to the nearest keys, coarser ones beyond: positions there are divided by a group size."""

@overload
def patch(
    model: Foreign,
    method: Literal["sinusoidal"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    base: float = ...,
    scale: float = ...,
) -> Schedule:
    """Add sines and cosines of the position to the input embeddings; no rotation."""

@overload
def patch(
    model: Foreign,
    method: Literal["t5_bias"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    buckets: int = ...,
    max_distance: int = ...,
    start: Literal["zero", "alibi"] = ...,
) -> Schedule:
    """Add a learned number per head and bucket of distances to the logits; no rotation."""

@overload
def patch(
    model: Foreign,
    method: Literal["theta"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    base: float | None = ...,
) -> Schedule:
    """Replace theta by a larger base: the adjusted base frequency of long-context training runs."""

@overload
def patch(
    model: Foreign,
    method: Literal["yarn"],
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    beta_fast: float = ...,
    beta_slow: float = ...,
    truncate: bool = ...,
    attention_factor: float | None = ...,
    mscale: float | None = ...,
    mscale_all_dim: float | None = ...,
) -> Schedule:
    """NTK-by-parts with a ramp over dimensions, and sharper attention: the usual choice without training."""

@overload
def patch(
    model: Foreign,
    method: str,
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    method_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Schedule: ...
def original_config(model: Foreign) -> dict[str, Any]: ...
def apply(model: Foreign, schedule: Schedule) -> None: ...
def unpatch(model: Foreign) -> None: ...
def schedule_of(model: Foreign) -> Schedule | None: ...
def find_decoder(model: Foreign) -> Foreign: ...
def verify(owner: Foreign) -> None: ...
