"""Checks of how a scaling is written: names, types and numbers that stop loading or that nothing reads."""

from __future__ import annotations

from ... import methods
from ...config.architectures import is_guard
from ...config.families import in_transformers, only_longrope, unsupported_reason
from ...config.keys import (
    OLD_NAMES,
    ORIGINAL,
    ROPE_TYPES,
    SCALING_KEYS,
    RopeType,
    head_dim,
    rope_parameters,
    rotary_dim,
)
from ...rope import Rope
from ...runtimes.facts import affected_by, listed
from .check import Found, check
from .folder import Folder, drop_key, set_keys, set_scaling

_LENGTHS = (ORIGINAL, "max_position_embeddings")
_TOP_NUMBERS = ("rope_theta", *_LENGTHS)


@check("error", "jquesnelle/yarn checkpoints need trust_remote_code of 2023")
def old_remote_code(folder: Folder) -> Found:
    """Code of 2023 beside a checkpoint that transformers runs by itself today."""
    code = " ".join(str(v) for v in (folder.config.get("auto_map") or {}).values())
    if "yarn" in code and folder.kind == "yarn" and in_transformers(folder.config.get("model_type", "")):
        yield (
            "config.json, auto_map",
            "brings YaRN code that fails on transformers 5, which runs YaRN itself",
            "drop auto_map",
            drop_key("config.json", "auto_map"),
        )


@check("error", "vLLM#52665; hand-edited configs")
def numbers_as_text(folder: Folder) -> Found:
    """Numbers in quotes."""
    inside = [key for key, kind in SCALING_KEYS.items() if kind in (int, float)]
    for key, at_top in [(key, False) for key in inside] + [(key, True) for key in _TOP_NUMBERS]:
        value = (folder.config if at_top else folder.scaling).get(key)
        if isinstance(value, str) and not is_guard(value):
            where = f"config.json, {key}" if at_top else f"rope {key}"
            try:
                number = int(float(value)) if key in _LENGTHS else float(value)
            except (ValueError, OverflowError):
                yield where, f"{value!r} is no number", "write the number that was meant", None
                continue
            mend = set_keys("config.json", **{key: number}) if at_top else set_scaling(**{key: number})
            yield where, f"{value!r} is text, not a number", f"write {number}", mend


@check("error", "transformers: a KeyError when the model is built")
def parts_missing(folder: Folder) -> Found:
    """llama3 and longrope without what they can't do without."""
    rope_type = ROPE_TYPES.get(OLD_NAMES.get(folder.kind, folder.kind), RopeType())
    missing = [key for key in rope_type.required if folder.scaling.get(key) is None]
    if missing and folder.scaled:
        what = f"{folder.kind} without {' and '.join(missing)} is a KeyError in transformers"
        yield "rope_scaling", what, "take the config from the base model", None


@check("error", "transformers: the scaling is dropped without a word")
def type_missing(folder: Folder) -> Found:
    """A scaling that doesn't say which one it is."""
    fix = "write the type that was trained, or null if there was no scaling"
    for dialect in ("rope_scaling", "rope_parameters"):
        found = folder.config.get(dialect)
        if found and not isinstance(found, dict):
            yield dialect, f"{found!r} is no object", fix, None
    keys = (SCALING_KEYS.keys() & folder.scaling.keys()) - {"rope_type", "type", "rope_theta", ORIGINAL}
    said = folder.scaling.get("rope_type") or folder.scaling.get("type")
    if keys and not said and not folder.nested:
        what = f"{', '.join(sorted(keys))} without a type: transformers runs no scaling at all"
        yield "rope_scaling", what, fix, None


@check("error", "transformers#25957; checkpoints of YaRN, LongLoRA and PoSE")
def old_names(folder: Folder) -> Found:
    """Scaling types that were renamed or never were transformers'."""
    keys, kind = folder.scaling, folder.kind
    if kind in OLD_NAMES and not only_longrope(folder.config.get("model_type") or ""):
        name = OLD_NAMES[kind]
        yield "rope_scaling", f"type {kind} is called {name} now", "rename it", set_scaling(rope_type=name)
    elif kind == "ntk" and isinstance(keys.get("factor"), int | float):
        theta = keys.get("rope_theta") or folder.config.get("rope_theta") or 10000.0
        rope = Rope(theta, head_dim(folder.config), folder.config.get("max_position_embeddings") or 2048)
        raised = (methods.get("ntk").function(rope, float(keys["factor"])).native or {})["rope_theta"]

        def mend(folder: Folder) -> None:
            folder.config["rope_scaling"] = None
            folder.config["rope_theta"] = raised
            folder.config["rope_parameters"] = {"rope_type": "default", "rope_theta": raised}

        yield "rope_scaling", "type ntk is a KeyError in transformers", f"write theta {raised:.8g} instead", mend
    elif (
        kind not in (*ROPE_TYPES, *OLD_NAMES)
        and not kind.startswith("ctxext")
        and not folder.nested
        and kind != "None"
    ):
        if unsupported_reason(folder.config):
            return  # a type of the family's own, as Qwen2-VL's mrope is
        yield "rope_scaling", f"no runtime knows type {kind!r}", "patch the original checkpoint anew", None


@check("warning", "checkpoints of YaRN")
def dead_keys(folder: Folder) -> Found:
    """`finetuned`."""
    if "finetuned" in folder.scaling:
        what = "`finetuned` is a key of YaRN's own code that nothing reads"
        yield "rope_scaling", what, "drop it", set_scaling(("finetuned",))


@check("error", "transformers: rope_theta None fails at build")
def theta_missing(folder: Folder) -> Found:
    """A null theta in the dict that wins."""
    keys, top = folder.config.get("rope_parameters"), folder.config.get("rope_theta")
    if isinstance(keys, dict) and "rope_theta" in keys and keys["rope_theta"] is None and top:
        what = "rope_parameters has a null rope_theta, which hides the one at the top"
        yield "rope_parameters", what, f"write {top}", set_scaling(rope_theta=float(top))


@check("error", "transformers: several scalings multiply head_dim unseen (Mixtral)")
def head_dim_null(folder: Folder) -> Found:
    """`head_dim: null` with a scaling."""
    if folder.scaled and "head_dim" in folder.config and folder.config["head_dim"] is None:
        size = head_dim(folder.config)
        what = "head_dim is null, which transformers' scaling functions multiply"
        yield "config.json", what, f"write {size}", set_keys("config.json", head_dim=size)


@check("error", "vLLM and SGLang: TypeError 'int' is not iterable")
def whole_factor(folder: Folder) -> Found:
    """An integer where a server wants a float."""
    factor = folder.scaling.get("factor")
    if isinstance(factor, int) and not isinstance(factor, bool) and folder.kind == "linear":
        stop = listed(affected_by("linear", "whole factor"))
        what = f"factor {factor} is written as an integer: {stop} stop under linear scaling"
        yield "rope_scaling", what, f"write {float(factor)}", set_scaling(factor=float(factor))


@check("error", "a list of factors for another head size")
def lists_of_wrong_length(folder: Folder) -> Found:
    """longrope lists that don't fit the model."""
    if OLD_NAMES.get(folder.kind, folder.kind) != "longrope":
        return
    size = rotary_dim(folder.config, rope_parameters(folder.config)) // 2
    for name in ("short_factor", "long_factor"):
        values = folder.scaling.get(name)
        if isinstance(values, list) and len(values) != size:
            what = f"{name} has {len(values)} values, the model has {size} frequencies"
            yield "rope_scaling", what, "take the list that was made for this model", None
