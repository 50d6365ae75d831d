"""From a config.json to ctxext's plain data: the Rope that it was trained with, the Schedule that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..errors import CtxextError, check_choice, warn
from ..methods.nope import UnrotatedLayers
from ..rope import Rope, Schedule, unpatched
from .block import read_block
from .families import SCALED_LAYERS
from .keys import number, original_length, rope_parameters, rotary_dim, sliding_window
from .meaning import published_scaling

Existing = Literal["refuse", "replace", "compose"]


def base_rope(config: Mapping[str, Any]) -> Rope:
    """Theta, rotary dimension and max_position_embeddings, as if nothing were scaled.

    Raises CtxextError or UsageError for a config.json that says no such thing, or nonsense about its window.
    """
    found = rope_parameters(config)
    sliding_window(config)
    length = _length(config)
    if length is None:
        raise _no_length()
    return Rope(found["rope_theta"], rotary_dim(config, found), int(length))


def read_schedule(config: Mapping[str, Any], trained_length: int | None = None) -> Schedule:
    """What the checkpoint runs as it stands: its rope, and whatever scaling its config already carries.

    trained_length overrides the config's idea of the tokens that the weights were trained to read as they stand
    (Llama 2 was once published with 2048 instead of 4096). Raises CtxextError for scalings that have no fixed
    frequencies.
    """
    block = config.get("ctxext")
    if block:
        return read_block(block)
    found = rope_parameters(config)
    length = _length(config)
    plain = found["rope_type"] == "default"
    original = original_length(config, found)
    base_length = (trained_length or length) if plain else (original or length or trained_length)
    if not base_length:
        raise _no_length()
    rope = Rope(found["rope_theta"], rotary_dim(config, found), int(base_length))
    if plain:
        return unpatched(rope)
    # What it runs doesn't depend on the length that the user gives.
    schedule = published_scaling(rope, found, length)
    return replace(schedule, max_length=trained_length or reads(config, found))


def reads(config: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    """Tokens that the weights of a scaled checkpoint were trained to read, as somebody else's config says.

    found: its `rope_parameters`. Makers disagree on what max_position_embeddings is under a scaling: the length
    before it or after it. Warns where nothing tells which.
    """
    length, original = _length(config) or 0.0, original_length(config, found) or 0.0
    factor = number(found, "factor") or 1.0
    if found["rope_type"] == "llama3":
        # Its factor says nothing of the length: Llama 3.2 has factor 32, original length 8192 and reads 131072.
        return int(length if length > original else original * factor)
    if original:
        return round(max(length, original * factor))
    told = number(config, "max_sequence_length") or 0.0
    if found["rope_type"] == "linear" and factor > 1 and told < length * factor:
        warn(
            f"linear scaling: max_position_embeddings, {length:g}, is taken for what the model reads with it. "
            f"Some checkpoints keep the length before scaling there: if this one does, pass --trained-length "
            f"{length * factor:g}"
        )
    return int(max(length, told))


def _length(config: Mapping[str, Any]) -> float | None:
    """Tokens that the config says the model reads, in GPT-2's word where it is that."""
    length = number(config, "max_position_embeddings")
    return number(config, "n_positions") if length is None else length


def _no_length() -> CtxextError:
    return CtxextError(
        "config.json has no max_position_embeddings", hint="say how long it was trained: --trained-length"
    )


def read_rope(
    config: Mapping[str, Any], *, trained_length: int | None = None, existing: Existing = "refuse"
) -> Rope:
    """The Rope to patch.

    existing says what to do with a checkpoint that is already scaled: "refuse"; "replace" drops the scaling
    and starts from the original rope; "compose" keeps it and extends what it reached.
    Raises UsageError for an unknown choice, CtxextError if it is scaled and the choice is "refuse".
    """
    check_choice("existing", existing, Existing)
    if existing == "replace" and not config.get("ctxext"):
        # Drop it unread: the scaling may be one that has no fixed frequencies.
        found = rope_parameters(config)
        original = original_length(config, found)
        if not original and not trained_length and found["rope_type"] == "linear":
            original = reads(config, found) / (number(found, "factor") or 1.0)
        kept = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_parameters")}
        plain = {k: v for k, v in found.items() if k in ("rope_theta", "partial_rotary_factor")}
        kept |= {"rope_parameters": {"rope_type": "default", **plain}}
        return read_schedule(kept, trained_length or (int(original) if original else None)).rope
    found = None if config.get("ctxext") else rope_parameters(config)
    if existing == "compose" and found is not None and found["rope_type"] == "dynamic":
        # Within what was trained it changes nothing: the weights know the plain rope.
        return read_rope(config, trained_length=trained_length, existing="replace")
    now = read_schedule(config, trained_length)
    if now.method == "none":
        return now.rope
    if existing == "replace" and isinstance(now.encoding, UnrotatedLayers):
        # The config says them in its own words, and what it said before isn't known.
        raise CtxextError(
            f"{now.method} stopped some layers of this checkpoint from rotating, which can't be undone here",
            hint="patch the checkpoint that it was made from",
        )
    if existing == "replace":
        return Rope(now.rope.theta, now.rope.dim, trained_length or now.rope.trained_length)
    if existing == "refuse":
        raise CtxextError(
            f"this checkpoint is already scaled: {now.method}, factor {now.factor:g}, "
            f"{now.rope.trained_length} to {now.max_length} tokens",
            hint="pass --existing compose to extend that further, or --existing replace to start from the "
            "original rope",
        )
    if not now.is_static:
        raise CtxextError(f"can't compose with {now.method}: it isn't a fixed frequency table")
    geometric = now.rope.geometric()
    ratios = tuple(f / g for f, g in zip(now.stages[0].inv_freq, geometric, strict=True))
    return Rope(
        now.rope.theta, now.rope.dim, trained_length or now.max_length, ratios, now.stages[0].attention_scale
    )


def check_layers(schedule: Schedule, layer_types: Callable[[], Iterable[str]]) -> None:
    """Raise CtxextError for a schedule that needs full attention in every layer, and layers of other types."""
    if len(schedule.stages) == 1 and not schedule.in_attention:
        return
    kinds = set(layer_types())
    if kinds - {SCALED_LAYERS}:
        raise CtxextError(
            f"{schedule.method} needs full attention in every layer, this model has {sorted(kinds)}",
            hint="use a static method, such as yarn",
        )


def native_schedule(config: Mapping[str, Any], trained_length: int | None = None) -> Schedule | None:
    """The model as it was trained, if its config has a scaling that ctxext didn't write; else None.

    Such a scaling is the rope that the weights know (Llama 3.1, gpt-oss, OLMo 3, LLaMA-2-7B-32K): it is in the
    Schedule's rope. A longrope that switches between two lists stands there as the long one.
    """
    found = rope_parameters(config)
    if config.get("ctxext") or found["rope_type"] == "default":
        return None
    if found.get("long_factor") is not None:
        config = {
            **config,
            "rope_parameters": {**found, "short_factor": found["long_factor"]},
            "rope_scaling": None,
        }
    return unpatched(read_rope(config, trained_length=trained_length, existing="compose"))
