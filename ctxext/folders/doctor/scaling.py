"""Checks of what a scaling says: lengths and scales that contradict each other, or are read in several ways."""

from __future__ import annotations

from ...config.keys import OLD_NAMES, ORIGINAL, ROPE_TYPES, SCALING_KEYS, rope_parameters
from ...config.rope_parameters import attn_factor
from ...methods.yarn import yarn_attention_scale
from ...runtimes.facts import affected_by, ignorers, listed, readers
from .check import Found, check
from .folder import Folder, set_keys, set_scaling

_CLOSE = 1e-4
_DYNAMIC = "patch it: --existing replace --method dynamic_ntk, or a static method"


@check("error", "transformers#38224, #36877")
def factor_missing(folder: Folder) -> Found:
    """A scaling without its factor or its original length, where the other two give it."""
    rope_type = ROPE_TYPES.get(folder.kind)
    if not folder.scaled or rope_type is None:
        return
    length, original, factor = folder.length, folder.original, folder.factor
    if factor is None and rope_type.factor:
        value = length / original if original and length and length > original else None
        yield (
            "rope_scaling",
            f"{folder.kind} without a factor",
            f"write {value:g}, the ratio of the lengths" if value else "write the factor that was trained",
            set_scaling(factor=value) if value else None,
        )
    elif original is None and rope_type.original and length and factor:
        whole = length / factor == int(length / factor) and factor > 1
        value = int(length / factor)
        yield (
            "rope_scaling",
            f"{folder.kind} without original_max_position_embeddings: readers take {length} for what was trained",
            f"write {value}, max_position_embeddings / factor" if whole else "write the trained length",
            set_scaling(original_max_position_embeddings=value) if whole else None,
        )


@check("error", "no runtime shrinks the length that was trained")
def factor_below_one(folder: Folder) -> Found:
    """A factor that would shorten what the model reads."""
    factor = folder.factor
    if folder.scaled and factor is not None and factor < 1:
        yield "rope_scaling", f"factor {factor:g} is below 1", "write the factor that was trained", None


@check("error", "transformers: the one at the top wins when the model is built")
def originals_differ(folder: Folder) -> Found:
    """Two original lengths."""
    top, inside = folder.config.get(ORIGINAL), folder.scaling.get(ORIGINAL)
    if top and inside and top != inside and not folder.ours:
        what = f"the original length is {top} at the top and {inside} in the scaling: transformers runs {top}"
        yield "config.json", what, f"write {top} in both", set_scaling(original_max_position_embeddings=top)


@check("error", "transformers 5: rope_scaling wins over rope_parameters")
def dialects_differ(folder: Folder) -> Found:
    """rope_scaling and rope_parameters that say different things."""
    old, new = folder.config.get("rope_scaling"), folder.config.get("rope_parameters")
    if not (isinstance(old, dict) and isinstance(new, dict)) or folder.nested or folder.ours:
        return
    runs = rope_parameters(folder.config)
    other = rope_parameters({k: v for k, v in folder.config.items() if k not in ("rope_scaling", "rope_theta")})
    shared = (SCALING_KEYS.keys() - {"type", "finetuned"}) & (runs.keys() | other.keys())
    differing = sorted(k for k in shared if runs.get(k) != other.get(k))
    if differing:
        yield (
            "config.json",
            f"rope_scaling and rope_parameters disagree about {', '.join(differing)}; transformers runs the first",
            "write what transformers runs in both",
            set_keys("config.json", rope_parameters=runs, rope_scaling=runs | {"type": runs["rope_type"]}),
        )


@check("error", "DeepSeek-R1#684; vLLM#46280, #48621; SGLang")
def attention_factor(folder: Folder) -> Found:
    """YaRN's attention scale under one name only: each runtime reads another."""
    keys = folder.scaling
    factor = keys.get("factor")
    if folder.kind != "yarn" or not isinstance(factor, int | float) or factor <= 1:
        return
    usual = yarn_attention_scale(factor)
    has, other = keys.get("attention_factor"), keys.get("attn_factor")
    if isinstance(other, int | float) and has is None and abs(other - 1) > _CLOSE:
        reads, ignore = readers("yarn.attn_factor"), ignorers("yarn.attn_factor")
        what = f"attn_factor {other} is read by {reads}, {ignore} ignore it"
        value = other * usual
        yield (
            "rope_scaling",
            what,
            f"write attention_factor {value:.6g} beside it",
            set_scaling(attention_factor=value),
        )
    elif isinstance(has, int | float) and other is None and abs(has - usual) > _CLOSE:
        what = f"attention_factor {has} is ignored by {readers('yarn.attn_factor')}"
        value = attn_factor(has, factor)
        yield "rope_scaling", what, f"write attn_factor {value:.6g} beside it", set_scaling(attn_factor=value)


@check("warning", "ms-swift#5146; vLLM#56446, #53634; exllamav3 takes the ratio")
def length_not_raised(folder: Folder) -> Found:
    """max_position_embeddings that isn't original length x factor."""
    length, original, factor = folder.length, folder.original, folder.factor
    if folder.kind not in ("yarn", "llama3") or folder.ours:
        return
    if not (length and original and factor) or factor < 1:
        return
    reads = round(original * factor)
    # Llama 3.1 says factor 8, original 8192 and 131072, Llama 3.2 the same with 32: under llama3 the product says
    # nothing, unless the length wasn't raised at all.
    if abs(length - reads) > 0.5 if folder.kind == "yarn" else length <= original:
        what = f"max_position_embeddings is {length}, original length x factor is {reads}"
        yield "config.json", what, f"write {reads}", set_keys("config.json", max_position_embeddings=reads)


@check("error", "transformers#25104: the length was raised, and dynamic scaling starts from it")
def never_sets_in(folder: Folder) -> Found:
    """Dynamic scaling of a length that was raised already."""
    length, original, factor = folder.length, folder.original, folder.factor
    if folder.kind == "dynamic" and original and factor and length == round(original * factor):
        what = "dynamic scaling never sets in: transformers takes max_position_embeddings for what was trained"
        yield "rope_scaling", what, _DYNAMIC, None


@check("warning", "vLLM#3488, #55910: dynamic and switching scaling")
def depends_on_the_call(folder: Folder) -> Found:
    """Scalings that give other text with a cache than without."""
    if folder.kind == "dynamic" and not folder.scaling.get("alpha") and not list(never_sets_in.look(folder)):
        what = "dynamic scaling contradicts its KV cache in transformers, and servers do something else"
        yield "rope_scaling", what, _DYNAMIC, None
    keys = folder.scaling
    if OLD_NAMES.get(folder.kind, folder.kind) == "longrope" and keys.get("short_factor") != keys.get(
        "long_factor"
    ):
        what = "two lists of factors switch by the length of the call: keys in a cache keep the old angles"
        yield "rope_scaling", what, "patch it: --existing replace --method longrope with both lists", None


@check("warning", "vLLM#42624, SGLang#14745, MarinFold#184, DeepSpeed#8345, LlamaFactory#9524")
def new_dialect_alone(folder: Folder) -> Found:
    """What transformers 5 saves: readers of rope_theta and rope_scaling run theta 10000 without scaling."""
    config = folder.config
    if not isinstance(config.get("rope_parameters"), dict) or folder.nested or folder.ours:
        return
    if config.get("rope_theta") is not None or config.get("rotary_emb_base") is not None:
        return
    found = rope_parameters(config)
    if found["rope_type"] == "default" and found["rope_theta"] == 10000.0:
        return
    plain = found["rope_type"] == "default"
    scaling = None if plain else {**found, "type": found["rope_type"]}
    mend = set_keys("config.json", rope_theta=found["rope_theta"], rope_scaling=scaling)
    misled = listed([*affected_by("no v4 keys"), "transformers 4"])
    what = f"rope_parameters alone: {misled} run theta 10000 without scaling"
    yield "config.json", what, "write rope_theta and rope_scaling beside it", mend
