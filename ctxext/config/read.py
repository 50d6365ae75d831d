"""From a config.json to ctxext's plain data: the Rope that it was trained with, the Schedule that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from ..errors import CtxextError, check_choice
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

    trained_length overrides the config's idea of the length before scaling (Llama 2 was once published
    with 2048 instead of 4096). Raises CtxextError for scalings that have no fixed frequencies.
    """
    block = config.get("ctxext")
    if block:
        return read_block(block)
    found = rope_parameters(config)
    length = _length(config)
    kind = found["rope_type"]
    original = original_length(config, found)
    base_length = trained_length or (original if kind != "default" and original else length)
    if not base_length:
        raise _no_length()
    rope = Rope(found["rope_theta"], rotary_dim(config, found), int(base_length))
    return unpatched(rope) if kind == "default" else published_scaling(rope, found, length)


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
        kept = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_parameters")}
        plain = {k: v for k, v in found.items() if k in ("rope_theta", "partial_rotary_factor")}
        kept |= {"rope_parameters": {"rope_type": "default", **plain}}
        return read_schedule(kept, trained_length or (int(original) if original else None)).rope
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
    if trained_length and config.get("max_position_embeddings"):
        # What the checkpoint runs doesn't depend on the length that the user gives.
        now = read_schedule(config)
    geometric = now.rope.geometric()
    ratios = tuple(f / g for f, g in zip(now.stages[0].inv_freq, geometric, strict=True))
    length = trained_length or now.max_length
    if not trained_length and not config.get("ctxext") and now.method in ("llama3", "longrope"):
        # Their factor says nothing of the length: Llama 3.1 has factor 8, original length 8192 and reads 131072.
        length = max(length, int(number(config, "max_position_embeddings") or 0))
    return Rope(now.rope.theta, now.rope.dim, length, ratios, now.stages[0].attention_scale)


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
    """The model as it was trained, if its config has a scaling that the weights were trained with; else None.

    llama3 is such a one, unless ctxext wrote it: Llama 3.1 and 3.2 were trained on all of max_position_embeddings
    with it. The scaling is then in the Schedule's rope.
    """
    if config.get("ctxext") or rope_parameters(config)["rope_type"] != "llama3":
        return None
    return unpatched(read_rope(config, trained_length=trained_length, existing="compose"))
