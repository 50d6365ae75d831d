"""The keys of a config.json that say what its rope is, in whichever dialect they are written.

Works on plain dicts, so that patching a folder imports neither torch nor transformers.

Two dialects exist. transformers 5 writes `rope_parameters` (theta inside); before that it was `rope_scaling`
plus a top-level `rope_theta`, which most servers, MLX and converters still read. A folder that speaks only
one of them is silently misread by readers of the other, so `write_config` writes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CtxextError
from .families import SCALED_LAYERS, WINDOWED_LAYERS, implicit, implicit_rope, leaves_implicit, per_layer_type

ORIGINAL = "original_max_position_embeddings"
# Keys that describe a scaling, with their types. Everything else in rope_parameters is the model's and is kept.
SCALING_KEYS: dict[str, type] = {
    ORIGINAL: int,
    "factor": float,
    "attention_factor": float,
    "attn_factor": float,
    "beta_fast": float,
    "beta_slow": float,
    "mscale": float,
    "mscale_all_dim": float,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "rope_theta": float,
    "short_mscale": float,
    "long_mscale": float,
    "short_factor": list,
    "long_factor": list,
    "truncate": bool,
    "finetuned": bool,
    "rope_type": str,
    "type": str,
}


@dataclass(frozen=True)
class RopeType:
    """What a type of scaling is written with.

    factor: it can't do without one. original: it starts from a trained length of its own. required: other keys
    without which transformers builds no model.
    """

    factor: bool = False
    original: bool = False
    required: tuple[str, ...] = ()


ROPE_TYPES = {
    "default": RopeType(),
    "linear": RopeType(factor=True),
    "dynamic": RopeType(),
    "yarn": RopeType(factor=True, original=True),
    "longrope": RopeType(original=True, required=("short_factor", "long_factor")),
    "llama3": RopeType(factor=True, original=True, required=("low_freq_factor", "high_freq_factor")),
    "proportional": RopeType(),
}
"""What `rope_type` may be in transformers."""
OLD_NAMES = {"su": "longrope"}
# In the source of a config class: a scaling that it fills in where config.json has none (gpt-oss, CWM).
_SCALED_BY_DEFAULT = r'rope_type": "(?:linear|dynamic|yarn|longrope|llama3)"'


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's scaling in one flat dict with rope_type and rope_theta, whichever dialect it is in.

    Precedence is transformers': rope_scaling over rope_parameters, a theta inside over one at the top.
    Raises CtxextError if there is no rope at all, none for layers with full attention, or a damaged one.
    """
    found = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    if not found and leaves_implicit(str(config.get("model_type") or ""), _SCALED_BY_DEFAULT):
        found = implicit_rope(config)
    if any(isinstance(value, Mapping) for value in found.values()):
        # One rope per type of layer: sliding layers never look further than their window, so theirs stays.
        if not found.get(SCALED_LAYERS):
            raise CtxextError("can't patch this model: no rope in its config is for layers with full attention")
        found = _object(found, SCALED_LAYERS)
    old_name = found.pop("type", None)
    found["rope_type"] = found.get("rope_type") or old_name or "default"
    model_type = config.get("model_type") or ""
    if not isinstance(model_type, str):
        raise CtxextError(f"model_type in config.json is {model_type!r}, which is no name")
    theta = number(found, "rope_theta") or number(config, "rope_theta") or number(config, "rotary_emb_base")
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    unsaid = (theta is None) or (
        partial is None and any(leaves_implicit(model_type, n) for n in ("partial_rotary_factor", "rotary_pct"))
    )
    if unsaid:
        # Only the config class knows what it fills in; asking it is the slow path for old checkpoints.
        filled = implicit_rope(config)
        filled = filled.get(SCALED_LAYERS) or {} if per_layer_type(model_type) else filled
        theta = theta or filled.get("rope_theta")
        partial = filled.get("partial_rotary_factor") if partial is None else partial
    if theta is None:
        raise CtxextError("can't patch this model: its config has no rope_theta, so no rotary embedding")
    found["rope_theta"] = float(theta)
    if partial is not None:
        found["partial_rotary_factor"] = float(partial)
    return _without_alpha(config, found)


def _without_alpha(config: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """HunYuan's `dynamic` with an `alpha` is a fixed theta, raised once: NTK by alpha instead of by a factor."""
    alpha = number(found, "alpha")
    if found["rope_type"] != "dynamic" or not alpha:
        return found
    dim = rotary_dim(config, found)
    kept = {k: v for k, v in found.items() if k not in SCALING_KEYS and k != "alpha"}
    return kept | {"rope_type": "default", "rope_theta": found["rope_theta"] * alpha ** (dim / (dim - 2))}


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


def head_dim(config: Mapping[str, Any]) -> int:
    """Coordinates per attention head, spelled out or hidden size / heads (Falcon and GPT-2 style names too)."""
    if number(config, "head_dim"):
        return int(config["head_dim"])
    if "head_dim" not in config and leaves_implicit(
        config.get("model_type") or "", r"head_dim: int(?: \| None)? = \d"
    ):
        # Qwen3's class has one of its own, which isn't hidden size / heads.
        size = implicit(config, "head_dim")
        if isinstance(size, int):
            return size
    hidden = number(config, "hidden_size") or number(config, "n_embd")
    heads = number(config, "num_attention_heads") or number(config, "n_head")
    if not hidden or not heads:
        raise CtxextError("config.json has neither head_dim nor hidden_size and num_attention_heads")
    return int(hidden) // int(heads)


def rotary_dim(config: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    """Coordinates per head that are rotated. found: the config's `rope_parameters`."""
    partial = number(found, "partial_rotary_factor")
    return int(head_dim(config) * (1.0 if partial is None else partial))


def original_length(config: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """Tokens before scaling, if the config says so: transformers lets the one at the top win."""
    return number(config, ORIGINAL) or number(found, ORIGINAL)


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """The window if *every* layer is limited to it, else None (a mix of layers is a design, not a limit)."""
    window = number(config, "sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        return int(window) if set(kinds) == {WINDOWED_LAYERS} else None
    # Families such as Gemma 2 alternate by rule when the list isn't spelled out.
    return None if leaves_implicit(config.get("model_type", ""), "layer_types:") else int(window)


def window_message(window: int, target: int) -> str:
    """Why a sliding window was removed."""
    return (
        f"every layer had a sliding window of {window} tokens, which hides whatever is further back from a model "
        f"meant to read {target}: the window is removed. If the model was trained on no more than the window "
        "shows, pass that as the trained length"
    )
