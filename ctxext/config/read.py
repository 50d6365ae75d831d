"""From a config.json to ctxext's plain data, a Rope and a Schedule; and ctxext's own block in it.

Works on plain dicts, so that patching a folder imports neither torch nor transformers.

Two dialects exist. transformers 5 writes `rope_parameters` (theta inside); before that it was `rope_scaling`
plus a top-level `rope_theta`, which most servers, MLX and converters still read. A folder that speaks only
one of them is silently misread by readers of the other, so `config_writing` writes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import methods
from ..errors import CtxextError, UsageError
from ..rope import Rope, Schedule, unpatched
from .block import read_block
from .families import leaves_implicit, per_layer_type

# Keys that describe a scaling. Everything else in rope_parameters belongs to the model and is kept.
SCALING_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "finetuned"),
        *("attention_factor", "attn_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
        *("short_factor", "long_factor", "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor"),
    )
)
# Where rope_parameters is nested per layer type: the type whose rope is scaled.
SCALED_LAYERS = "full_attention"
EXISTING = ("refuse", "replace", "compose")


ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""What `rope_type` may be in transformers."""


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's scaling in one flat dict with rope_type and rope_theta, whichever dialect it is in.

    Precedence is transformers': rope_scaling over rope_parameters, a theta inside over one at the top.
    Raises CtxextError if there is no rope at all, none for layers with full attention, or a damaged one.
    """
    found = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    if any(isinstance(value, Mapping) for value in found.values()):
        # One rope per type of layer: sliding layers never look further than their window, so theirs stays.
        if not found.get(SCALED_LAYERS):
            raise CtxextError("can't patch this model: no rope in its config is for layers with full attention")
        found = _object(found, SCALED_LAYERS)
    found["rope_type"] = found.get("rope_type", found.pop("type", "default"))
    model_type = config.get("model_type") or ""
    if not isinstance(model_type, str):
        raise CtxextError(f"model_type in config.json is {model_type!r}, which is no name")
    theta = number(found, "rope_theta") or number(config, "rope_theta") or number(config, "rotary_emb_base")
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    unsaid = (theta is None) or (
        partial is None and any(leaves_implicit(model_type, n) for n in ("partial_rotary_factor", "rotary_pct"))
    )
    if unsaid:
        # Only the config class knows what it fills in; this import is the slow path for old checkpoints.
        implicit = _class_defaults(config)
        theta = theta or implicit.get("rope_theta")
        partial = implicit.get("partial_rotary_factor") if partial is None else partial
    if theta is None:
        raise CtxextError("can't patch this model: its config has no rope_theta, so no rotary embedding")
    found["rope_theta"] = float(theta)
    if partial is not None:
        found["partial_rotary_factor"] = float(partial)
    return found


def _object(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of the object of this name, empty if it is missing or null; CtxextError if it is something else."""
    found = data.get(name)
    if found and not isinstance(found, Mapping):
        raise CtxextError(
            f"{name} in config.json is {found!r}, which is no object",
            hint="take the config from the base model, or write null if the model isn't scaled",
        )
    return dict(found or {})


def number(data: Mapping[str, Any], name: str) -> float | None:
    """The number of this name, None if it is missing or null; CtxextError if it is something else."""
    found = data.get(name)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
        raise CtxextError(
            f"{name} in config.json is {found!r}, which is no number",
            hint="ctxext doctor --fix mends a number in quotes; else take the config from the base model",
        )
    return found


def _class_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the family's class fills in of the rope. The scaling stays out: it adds nothing, and may be damaged."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type", "")
    if model_type not in CONFIG_MAPPING:
        return {}
    scaling = ("rope_scaling", "rope_parameters")
    given = {k: v for k, v in config.items() if v is not None and k not in scaling}
    built = CONFIG_MAPPING[model_type].from_dict(given)
    found = dict(getattr(built, "rope_parameters", None) or {})
    return dict(found.get(SCALED_LAYERS) or {}) if per_layer_type(model_type) else found


def head_dim(config: Mapping[str, Any]) -> int:
    """Coordinates per attention head, spelled out or hidden size / heads (Falcon and GPT-2 style names too)."""
    if number(config, "head_dim"):
        return int(config["head_dim"])
    hidden = number(config, "hidden_size") or number(config, "n_embd")
    heads = number(config, "num_attention_heads") or number(config, "n_head")
    if not hidden or not heads:
        raise CtxextError("config.json has neither head_dim nor hidden_size and num_attention_heads")
    return int(hidden) // int(heads)


def base_rope(config: Mapping[str, Any]) -> Rope:
    """Theta, rotary dimension and max_position_embeddings, as if nothing were scaled.

    Raises CtxextError or UsageError for a config.json that says no such thing, or nonsense about its window.
    """
    found = rope_parameters(config)
    sliding_window(config)
    dim = int(head_dim(config) * (number(found, "partial_rotary_factor") or 1.0))
    length = number(config, "max_position_embeddings")
    length = number(config, "n_positions") if length is None else length
    if length is None:
        raise CtxextError(
            "config.json has no max_position_embeddings", hint="say how long it was trained: --trained-length"
        )
    return Rope(found["rope_theta"], dim, int(length))


def read_schedule(config: Mapping[str, Any], trained_length: int | None = None) -> Schedule:
    """What the checkpoint runs as it stands: its rope, and whatever scaling its config already carries.

    trained_length overrides the config's idea of the length before scaling (Llama 2 was once published
    with 2048 instead of 4096). Raises CtxextError for scalings that have no fixed frequencies.
    """
    block = config.get("ctxext")
    if block:
        return read_block(block)
    found = rope_parameters(config)
    length = number(config, "max_position_embeddings") or number(config, "n_positions")
    kind = found["rope_type"]
    original = _original(config, found)
    base_length = trained_length or (original if kind != "default" and original else length)
    if not base_length:
        raise CtxextError(
            "config.json has no max_position_embeddings", hint="say how long it was trained: --trained-length"
        )
    dim = int(head_dim(config) * found.get("partial_rotary_factor", 1.0))
    rope = Rope(found["rope_theta"], dim, int(base_length))
    if kind == "default":
        return unpatched(rope)
    try:
        return _known_scaling(rope, found, length)
    except KeyError as error:
        raise CtxextError(
            f"the {kind} scaling in config.json lacks {error}",
            hint="take the config from the base model, or pass --existing replace to drop that scaling",
        ) from None


def _original(config: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """The length before scaling, in tokens: transformers lets the one at the top win."""
    key = "original_max_position_embeddings"
    return number(config, key) or number(found, key)


def _known_scaling(rope: Rope, found: Mapping[str, Any], length: int | None) -> Schedule:
    """The Schedule of a scaling that transformers knows by name."""
    kind = found["rope_type"]
    factor = number(found, "factor") or (length / rope.trained_length if length else 1.0)
    if kind == "linear":
        return methods.schedule(rope, "pi", factor)
    if kind in ("yarn", "llama3"):
        options = {o.name for o in methods.get(kind).options}
        given = {k: v for k, v in found.items() if k in options and v is not None}
        # transformers knows no defaults for these two.
        given |= {k: found[k] for k in ("low_freq_factor", "high_freq_factor") if k in options}
        return methods.schedule(rope, kind, factor, **given)
    if kind in ("longrope", "su"):
        if found["short_factor"] != found["long_factor"]:
            raise CtxextError(
                "this checkpoint switches between short and long factors by the length of the call",
                hint="pass --existing replace to drop that scaling and patch its original rope",
            )
        if length and length < rope.trained_length:
            length = rope.trained_length
        return methods.schedule(
            rope,
            "longrope",
            max(factor, 1.0),
            long_factor=found["long_factor"],
            attention_factor=found.get("attention_factor"),
        )
    raise CtxextError(
        f"this checkpoint is already scaled by rope type {kind!r}, which has no fixed frequencies to build on",
        hint="pass --existing replace to drop that scaling and patch its original rope",
    )


def read_rope(config: Mapping[str, Any], *, trained_length: int | None = None, existing: str = "refuse") -> Rope:
    """The Rope to patch.

    existing says what to do with a checkpoint that is already scaled: "refuse"; "replace" drops the scaling
    and starts from the original rope; "compose" keeps it and extends what it reached.
    Raises UsageError for an unknown choice, CtxextError if it is scaled and the choice is "refuse".
    """
    if existing not in EXISTING:
        raise UsageError(f"existing={existing!r} is not one of {', '.join(EXISTING)}")
    if existing == "replace" and not config.get("ctxext"):
        # Drop it unread: the scaling may be one that has no fixed frequencies.
        found = rope_parameters(config)
        original = _original(config, found)
        kept = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_parameters")}
        plain = {k: v for k, v in found.items() if k in ("rope_theta", "partial_rotary_factor")}
        kept |= {"rope_parameters": {"rope_type": "default", **plain}}
        return read_schedule(kept, trained_length or original).rope
    now = read_schedule(config, trained_length)
    if now.method == "none":
        return now.rope
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


def native_schedule(config: Mapping[str, Any], trained_length: int | None = None) -> Schedule | None:
    """The model as it was trained, if its config has a scaling that the weights were trained with; else None.

    llama3 is such a one, unless ctxext wrote it: Llama 3.1 and 3.2 were trained on all of max_position_embeddings
    with it. The scaling is then in the Schedule's rope.
    """
    if config.get("ctxext") or rope_parameters(config)["rope_type"] != "llama3":
        return None
    return unpatched(read_rope(config, trained_length=trained_length, existing="compose"))


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """The window if *every* layer is limited to it, else None (a mix of layers is a design, not a limit)."""
    window = number(config, "sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        return int(window) if set(kinds) == {"sliding_attention"} else None
    # Families such as Gemma 2 alternate by rule when the list isn't spelled out.
    return None if leaves_implicit(config.get("model_type", ""), "layer_types:") else int(window)


def window_message(window: int, target: int) -> str:
    """Why a sliding window was removed."""
    return (
        f"every layer had a sliding window of {window} tokens, which hides whatever is further back from a model "
        f"meant to read {target}: the window is removed. If the model was trained on no more than the window "
        "shows, pass that as the trained length"
    )
