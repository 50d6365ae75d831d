"""How a schedule is spelled in `rope_parameters`: by transformers' own type, or as a table that all can read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from .. import methods
from ..errors import check_choice
from ..methods.yarn import yarn_attention_scale
from ..rope import Schedule
from .families import only_longrope, per_layer_type
from .keys import ORIGINAL

# Stands for "no rotation" in a table of divisors: at 1e18 no position below 1e9 turns by a float32 epsilon,
# and theta * 1e18 still fits in float32.
STOPPED = 1e18
REFUSE = "needs ctxext.load"
Fallback = Literal["refuse", "static"]
"""What plain transformers shall do with a schedule that it can't run: stop, or run its static approximation."""


@dataclass(frozen=True)
class Target:
    """What the runtime that comes first needs, where one form can't suit all.

    trained_length_under_linear: it multiplies max_position_embeddings by a linear factor itself.
    yarn_options_as_table: it runs yarn's defaults alone, and a table exactly.
    """

    trained_length_under_linear: bool = False
    yarn_options_as_table: bool = False


ANY = Target()


def carrier(schedule: Schedule) -> dict[str, Any]:
    """Any static schedule as transformers' longrope type with equal short and long factors.

    Runtimes disagree on longrope's attention scale: transformers reads attention_factor, vLLM and SGLang the
    mscale keys, MLX-LM and ExLlama compute it from the two lengths. All of them are made to say the same; what the
    model was trained with stands in the "ctxext" block.
    """
    stage = schedule.stages[0]
    length = schedule.max_length
    divisors = [_divisor(g, f) for g, f in zip(schedule.rope.geometric(), stage.inv_freq, strict=True)]
    scale = stage.attention_scale
    # MLX and ExLlama know the formula alone: the "original length" at which it gives this scale. Both lists are
    # the same, so that it doesn't matter which one a runtime picks by it.
    original = round(length ** (1 / scale**2)) if scale >= 1 else schedule.rope.trained_length
    original = max(2, original)
    return {
        "rope_type": "longrope",
        "factor": length / original,
        ORIGINAL: original,
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": scale,
        "short_mscale": scale,
        "long_mscale": scale,
    }


def _divisor(geometric: float, frequency: float) -> float:
    """What divides `geometric` into `frequency`, as the decimal that it came as if that is the same to float64.

    Factors are decimals (1.25). Divided into a frequency and out again they may come as a float64 beside them.
    """
    exact = min(geometric / frequency, STOPPED) if frequency > 0 else STOPPED
    decimal = float(f"{exact:.15g}")
    # Two roundings' worth: what the ways there and back may lose.
    return decimal if math.isclose(decimal, exact, rel_tol=2**-51) else exact


def attn_factor(attention_scale: float, factor: float) -> float:
    """The ratio that gives this attention scale where a runtime multiplies yarn's own, 0.1 ln s + 1, by it.

    `attn_factor` is that ratio to SGLang, and to llama.cpp in a GGUF.
    """
    return attention_scale / yarn_attention_scale(factor)


@cache
def _yarn_ramp() -> dict[str, Any]:
    """YaRN's options that have a value by default: where its ramp lies, and that it is rounded."""
    return {o.name: o.default for o in methods.get("yarn").options if o.default is not None}


def usual_ramp(keys: Mapping[str, Any]) -> bool:
    """Whether these keys of a yarn scaling leave its ramp as it is by default."""
    return all(keys.get(name, value) == value for name, value in _yarn_ramp().items())


def native_parameters(
    schedule: Schedule,
    model_type: str = "",
    fallback: Fallback = "refuse",
    target: Target = ANY,
    live: bool = False,
) -> dict[str, Any]:
    """`rope_parameters` for a schedule: its native type, else the carrier, else a type no runtime accepts.

    A schedule that is more than a frequency table gets a rope_type that makes plain transformers stop with
    a KeyError that names ctxext.load, because any type it accepts would run something else. With fallback
    "static" plain transformers gets the schedule's static approximation instead. target, live: see `write_config`.
    """
    check_choice("fallback", fallback, Fallback)
    theta = schedule.rope.theta
    if not schedule.is_static and fallback == "static":
        return {"rope_theta": theta, **carrier(schedule.static_approximation())}
    if not schedule.is_static:
        saved = live and only_longrope(model_type)
        return {"rope_theta": theta, **(_saveable(schedule) if saved else refused(schedule, model_type))}
    native = schedule.native
    # transformers looks for yarn's truncate at the top of a nested dict, and doesn't find it.
    untold = native is not None and native.get("truncate") is False and per_layer_type(model_type)
    if native is None or untold or (only_longrope(model_type) and native["rope_type"] != "default"):
        return {"rope_theta": theta, **carrier(schedule)}
    if target.yarn_options_as_table and native["rope_type"] == "yarn" and not _usual_yarn(native):
        return {"rope_theta": theta, **carrier(schedule)}
    keys = {"rope_theta": theta, **native}
    if native["rope_type"] == "yarn" and schedule.factor > 1:
        # Runtimes differ in which of the two they read.
        keys["attn_factor"] = attn_factor(keys["attention_factor"], schedule.factor)
    if native["rope_type"] == "linear":
        # Without it some take max_position_embeddings times factor for the length.
        keys[ORIGINAL] = schedule.rope.trained_length
    return keys


def refusal(schedule: Schedule) -> str:
    """What stands where a runtime would look for something else, so that its error names ctxext.load."""
    return f"ctxext {schedule.method} ({REFUSE})"


def refused(schedule: Schedule, model_type: str) -> dict[str, Any]:
    """What plain transformers stops at, naming ctxext.load."""
    said = refusal(schedule)
    # Phi-MoE's config class looks at the mscale keys alone, and repeats what it finds there.
    return {"rope_type": said, **({"short_mscale": said} if only_longrope(model_type) else {})}


def _saveable(schedule: Schedule) -> dict[str, Any]:
    """The same in the words of a config class that lets no type be saved but longrope.

    `write_config` puts what names ctxext.load beside it. Where nobody looks at that, text for the factor is a
    TypeError when a model is built, and lists of zeros make NaN of every angle.
    """
    zeros = [0.0] * schedule.rope.size
    return {
        "rope_type": "longrope",
        "factor": refusal(schedule),
        ORIGINAL: schedule.rope.trained_length,
        "short_factor": zeros,
        "long_factor": zeros,
        "short_mscale": 1.0,
        "long_mscale": 1.0,
    }


def _usual_yarn(native: Mapping[str, Any]) -> bool:
    scale = yarn_attention_scale(native["factor"])
    return usual_ramp(native) and abs(native["attention_factor"] - scale) < 1e-9
