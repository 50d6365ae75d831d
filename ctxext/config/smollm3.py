"""Layers that don't rotate, in transformers' own words: a Llama with a choice of them is a SmolLM3.

The two architectures have the same weights by the same names; SmolLM3's config says per layer whether it rotates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..methods.nope import UnrotatedLayers
from ..rope import Schedule

# What a Llama's config.json may leave out and SmolLM3's class would fill in with something else.
_LLAMA_DEFAULTS = {"tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}


def expressible(schedule: Schedule, model_type: str) -> bool:
    """Whether a SmolLM3 config says all that this schedule has beyond its frequencies."""
    return isinstance(schedule.encoding, UnrotatedLayers) and model_type in ("llama", "smollm3")


def layers_config(config: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """config.json of a Llama or SmolLM3 as that of a SmolLM3 with the schedule's layers unrotated."""
    assert isinstance(schedule.encoding, UnrotatedLayers)
    count = int(config["num_hidden_layers"])
    rotates = list(config.get("no_rope_layers") or [1] * count)
    for i in schedule.encoding.of(count):
        rotates[i] = 0
    new = dict(config)
    if config.get("model_type") == "llama":
        new = {**_LLAMA_DEFAULTS, "num_key_value_heads": config.get("num_attention_heads"), **config}
    heads = [re.sub(r"^\w*?(?=For[A-Z]|Model$)", "SmolLM3", name) for name in config.get("architectures") or ()]
    heads = heads or ["SmolLM3ForCausalLM"]
    return new | {"model_type": "smollm3", "architectures": heads, "no_rope_layers": rotates}


def is_written(config: Mapping[str, Any], schedule: Schedule) -> bool:
    """Whether config.json says the schedule's layers by itself, so that plain transformers runs them."""
    rotates = config.get("no_rope_layers")
    if not expressible(schedule, config.get("model_type", "")) or not rotates:
        return False
    assert isinstance(schedule.encoding, UnrotatedLayers)
    return not any(rotates[i] for i in schedule.encoding.of(len(rotates)))
