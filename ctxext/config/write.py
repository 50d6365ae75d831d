"""A Schedule into a config.json, in both dialects that are read out there (see `keys`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CtxextError
from ..rope import Schedule
from . import smollm3
from .architectures import guarded, unguarded
from .block import block
from .families import SCALED_LAYERS, implicit_rope, per_layer_type
from .keys import ORIGINAL, SCALING_KEYS, head_dim, rope_parameters
from .rope_parameters import ANY, Fallback, Target, carrier, native_parameters, refusal, refused


def write_config(
    config: Mapping[str, Any],
    schedule: Schedule,
    *,
    fallback: Fallback = "refuse",
    target: Target = ANY,
    live: bool = False,
) -> dict[str, Any]:
    """A copy of a config.json dict that says `schedule` in both dialects and in ctxext's own block.

    Keys that ctxext doesn't know are kept. max_position_embeddings becomes the schedule's max_length.
    fallback: what plain transformers shall do with a schedule it can't run, "refuse" or "static".
    target: the runtime that comes first where one form can't suit all; by default the form that suits most.
    live: for a model in memory, which can't become another architecture, and which its config class must be able
    to save.
    """
    new, said = unguarded(config), schedule
    if not live and smollm3.expressible(schedule, config.get("model_type", "")):
        new, said = smollm3.layers_config(config, schedule), schedule.table_alone()
    found = rope_parameters(config)
    kept = {k: v for k, v in found.items() if k not in SCALING_KEYS}
    keys = {**native_parameters(said, config.get("model_type", ""), fallback, target, live), **kept}
    grows_from = found.get(ORIGINAL) if "llama_4_scaling_beta" in kept else None
    if grows_from:
        # Attention itself reads both (Ministral 3): a temperature that grows beyond this length, whatever the rope
        # says. Where the scaling needs another one under the same name, a table says the same without it.
        if keys.get(ORIGINAL, grows_from) != grows_from and said.is_static and keys["rope_type"] != "longrope":
            keys = {"rope_theta": keys["rope_theta"], **carrier(said), **kept}
        keys[ORIGINAL] = grows_from
    if per_layer_type(config.get("model_type", "")):
        return _write_nested(new, keys, schedule)
    new["rope_parameters"] = keys
    plain = keys["rope_type"] == "default"
    new["rope_scaling"] = None if plain else {**keys, "type": keys["rope_type"]}
    if live and not schedule.is_static:
        # Read first when it is loaded, and not looked at when it is saved.
        refusing = refused(schedule, config.get("model_type", ""))
        new["rope_scaling"] = {"rope_theta": keys["rope_theta"], **refusing}
    new["rope_theta"] = keys["rope_theta"]
    if "rotary_emb_base" in config:
        new["rotary_emb_base"] = keys["rope_theta"]
    multiplied = target.trained_length_under_linear and keys["rope_type"] == "linear"
    new["max_position_embeddings"] = schedule.rope.trained_length if multiplied else schedule.max_length
    # transformers lets a top-level original length win over the one in the dict, and llama.cpp's converter
    # reads only the top-level one for llama3; for longrope it would lower vLLM's default length.
    if ORIGINAL in config or keys["rope_type"] == "llama3":
        new[ORIGINAL] = keys.get(ORIGINAL, schedule.rope.trained_length)
    if "head_dim" in config and config["head_dim"] is None:
        # Several of transformers' scaling functions multiply head_dim without looking whether it is there.
        new["head_dim"] = head_dim(config)
    new["ctxext"] = block(schedule)
    stopped = fallback == "refuse" and not said.is_static
    return guarded(new, refusal(schedule)) if stopped else new


def _write_nested(new: dict[str, Any], keys: dict[str, Any], schedule: Schedule) -> dict[str, Any]:
    """The rest of `write_config` for a rope per layer type, which the older dialect has no common word for."""
    if keys["rope_type"].startswith("ctxext"):
        raise CtxextError(
            f"{schedule.method} needs one rotary embedding for all layers, this model keeps one per layer type",
            hint="use a static method, such as yarn",
        )
    nested = new.get("rope_parameters")
    if not (isinstance(nested, Mapping) and SCALED_LAYERS in nested):
        nested = implicit_rope(new)
    new["rope_parameters"] = {**nested, SCALED_LAYERS: keys}
    # Flat, it would take the place of the nested dict, or be laid over it.
    new.pop("rope_scaling", None)
    new["rope_theta"] = keys["rope_theta"]
    new["max_position_embeddings"] = schedule.max_length
    new["ctxext"] = block(schedule)
    return new
