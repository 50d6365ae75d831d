"""What can be known about a model family without importing it: transformers' own source files are read as text.

Importing a modelling file costs seconds and hundreds of MB, and a hand-kept list of families would be out of
date with the next release. The few facts needed here (does the family use the standard rotary embedding, what
does its config class leave implicit) stand in plain sight in the installed files.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import CtxextError
from .architectures import unguarded

# Where rope_parameters is nested per layer type: the type whose rope is scaled.
SCALED_LAYERS = "full_attention"
WINDOWED_LAYERS = "sliding_attention"


@cache
def _source(model_type: str, kind: str) -> str | None:
    """Text of transformers/models/<family>/<kind>_<family>.py, or None if there is no such family."""
    root = _models()
    folder = model_type.replace("-", "_")
    for family in (folder, folder.removesuffix("_text")):
        path = root / family / f"{kind}_{family}.py"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    borrowed = _borrowed_from(model_type) if kind == "modeling" else None
    return _source(borrowed, kind) if borrowed else None


def _models() -> Path:
    spec = importlib.util.find_spec("transformers")
    return Path((spec and spec.origin) or "").parent / "models"


def _borrowed_from(model_type: str) -> str | None:
    """The family whose classes run this one (InternLM 3 is a Llama with a config class of its own), or None."""
    auto = (_models() / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    found = re.search(rf'\("{re.escape(model_type)}", "(\w+)ForCausalLM"\)', auto)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", found.group(1)).lower() if found else None
    return name if name != model_type and (_models() / str(name)).is_dir() else None


def in_transformers(model_type: str) -> bool:
    """Whether the installed transformers has modelling code for this model type."""
    return _source(model_type, "modeling") is not None


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json can't be patched, or None if its rotary embedding is the standard one."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return "its config.json has no model_type, so it isn't a transformers model"
    source = _source(model_type, "modeling")
    if source is None:
        return f"the installed transformers has no model type {model_type!r}"
    if "text_config" in config:
        return f"{model_type} is multimodal: its rotary embedding sits in a text model inside"
    if "dynamic_rope_update" not in source or config.get("alibi"):
        return f"{model_type} has no rotary embedding of the standard kind"
    if _switched_off(config, source):
        return f"this {model_type} doesn't rotate: its own config switches the rotary embedding off"
    body = _rotary(model_type)
    others = _other_layer_types(config) if per_layer_type(model_type) else set()
    if others:
        return f"{model_type} keeps rotary embeddings for layers of type {', '.join(sorted(others))}"
    if "torch.polar" in body:
        return f"{model_type} rotates by complex numbers"
    if not re.search(r"def forward\(self, x, position_ids", body):
        return f"the rotary embedding of {model_type} isn't called as (x, position_ids)"
    kinds = config.get("layer_types")
    # An older config leaves the pattern to its class.
    mixed = {SCALED_LAYERS, WINDOWED_LAYERS} <= set(kinds or ()) or (
        kinds is None and config.get("sliding_window")
    )
    if mixed and _rotates_windows_only(source):
        return (
            f"{model_type} turns the keys of its sliding layers only, which never look further than their window; "
            "its other layers know no positions, so there is nothing to scale"
        )
    if config.get("layer_rope_theta"):
        return f"{model_type} gives layers a theta of their own each"
    if "qk_rope_head_dim" in config:
        return f"{model_type} uses latent attention, where scaling also changes the softmax scale"
    return None


def _switched_off(config: Mapping[str, Any], source: str) -> bool:
    """Whether a switch of the family's own says that there is no rope, or that no layer uses it.

    Granite 4 builds none unless position_embedding_type is "rope", Zamba 2 none without use_mem_rope.
    """
    for switch, on in (("position_embedding_type", "rope"), ("use_mem_rope", True)):
        if f"config.{switch}" in source and "otary" in source:
            said = config[switch] if switch in config else implicit(config, switch)
            if said != on and (on is True or f'{switch} == "{on}"' in source):
                return True
    rotates = config.get("no_rope_layers")
    return isinstance(rotates, list) and bool(rotates) and not any(rotates)


def _rotary(model_type: str) -> str:
    """The source of the family's rotary class; the text model's where there are several."""
    source = _source(model_type, "modeling") or ""
    found = re.findall(r"class (\w*RotaryEmbedding)\(nn\.Module\):(.*?)(?=\n\S)", source, re.S)
    text = [body for name, body in found if "Text" in name]
    return next(iter(text or [body for _, body in found]), "")


def _rotates_windows_only(source: str) -> bool:
    """Whether attention applies its rope under a condition on the window, as Cohere 2 and EXAONE 4 do."""
    condition = r"if self\.(?:is_local_attention|sliding_window is (?:not )?None(?: or self\.\w+)?):"
    return re.search(condition + r"\n(?:.*\n){0,3}?.*= apply_rotary_pos_emb\(", source) is not None


def per_layer_type(model_type: str) -> bool:
    """Whether the family keeps one table per type of layer, as Gemma 3 does: rope_parameters is then nested."""
    return "layer_type" in _rotary(model_type)


def _other_layer_types(config: Mapping[str, Any]) -> set[str]:
    """Types of layers with a rope of their own that are neither full nor sliding attention."""
    nested = config.get("rope_parameters") or {}
    kinds: set[str] = {k for k, v in nested.items() if isinstance(v, Mapping)}
    kinds = kinds or set(config.get("layer_types") or ())
    return kinds - {SCALED_LAYERS, WINDOWED_LAYERS}


def require_support(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> None:
    """Raise CtxextError with the reason if the model can't be patched.

    A model whose code comes with the checkpoint can't be judged by its source here; with
    `trust_remote_code` it is taken to read its config like a Llama.
    """
    reason = unsupported_reason(config)
    if reason is None:
        return
    if config.get("auto_map") and not in_transformers(config.get("model_type", "")):
        if trust_remote_code:
            return
        raise CtxextError(
            "this checkpoint brings its own modelling code (auto_map in config.json), which ctxext can't judge",
            hint="read its code; if it takes rope_scaling like a Llama does, pass --trust-remote-code",
        )
    raise CtxextError(f"can't patch this model: {reason}")


def leaves_implicit(model_type: str, name: str) -> bool:
    """Whether the family's config class mentions `name`, so may give it a value that config.json doesn't."""
    return re.search(rf"\b{name}", _source(model_type, "configuration") or "") is not None


def _filled_in(config: Mapping[str, Any]) -> Any:
    """The family's config object for a config.json, without its scaling, which may be damaged; None if unknown."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type", "")
    if model_type not in CONFIG_MAPPING:
        return None
    config = unguarded(config)
    plain = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_parameters") and v is not None}
    return CONFIG_MAPPING[model_type].from_dict(plain)


def implicit(config: Mapping[str, Any], name: str) -> Any:
    """The value that the family's class gives to a key where config.json is silent; None if it gives none."""
    return getattr(_filled_in(config), name, None)


def implicit_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as the family's class fills them in where config.json is silent; {} for a strange family.

    Nested by layer type where it keeps several. A scaling stays out: it adds nothing.
    """
    return dict(getattr(_filled_in(config), "rope_parameters", None) or {})


def layer_types(config: Mapping[str, Any]) -> set[str]:
    """The types of a model's layers, as config.json or the family's class says; empty if it has no such thing."""
    said = config.get("layer_types")
    if said is None and leaves_implicit(config.get("model_type", ""), "layer_types"):
        said = getattr(_filled_in(config), "layer_types", None)
    return set(said or ())


def only_longrope(model_type: str) -> bool:
    """Whether the family runs no scaling but longrope: Phi-3's config class says so, Phi-MoE reads its keys."""
    refuses = 'not in ["default", "longrope"]' in (_source(model_type, "configuration") or "")
    return refuses or '["long_mscale"]' in (_source(model_type, "modeling") or "")
