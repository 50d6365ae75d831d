"""Between a Schedule and what llama.cpp reads about a rope from a GGUF file.

llama.cpp turns pair i by position * freq_base^(-2i/d) / rope_freqs[i] and multiplies cos and sin by
`rope.scaling.attn_factor`. Those two say every static schedule exactly, where its named scaling types do not: yarn
ignores the betas and the attention factor in the file, and multiplies its own 0.1 ln s + 1 on top of attn_factor.
Only some architectures read `rope_freqs.weight`; a file of another one that holds it isn't even loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.block import block
from ..config.keys import OLD_NAMES, ORIGINAL, head_dim, sliding_window
from ..config.rope_parameters import Fallback, attn_factor, carrier, usual_ramp
from ..errors import CtxextError, warn
from ..methods.yarn import yarn_attention_scale
from ..rope import Schedule
from .gguf_file import metadata, read_gguf, tensor

TENSOR = "rope_freqs.weight"
BLOCK = "ctxext.schedule"
# Architectures whose llama.cpp graph was run against transformers, and whether it reads rope_freqs.weight.
READS_TABLE = {"llama": True, "qwen2": False, "qwen3": False}
# By model_type, those that run it, the first that can say the schedule. Qwen2 is a Llama with biases on q, k
# and v, which llama.cpp's Llama reads.
ARCHITECTURES = {"llama": ("llama",), "mistral": ("llama",), "qwen2": ("qwen2", "llama"), "qwen3": ("qwen3",)}


@dataclass(frozen=True)
class GgufRope:
    """What a GGUF says about its rope: keys without the architecture's prefix, and rope_freqs.weight or None."""

    keys: dict[str, str | int | float]
    freqs: tuple[float, ...] | None
    block: str | None

    def prefixed(self, arch: str) -> dict[str, str | int | float]:
        """The keys as they stand in a file of this architecture, and ctxext's own block."""
        said = {f"{arch}.{key}": value for key, value in self.keys.items()}
        return said if self.block is None else said | {BLOCK: self.block}


def gguf_rope(schedule: Schedule, arch: str, fallback: Fallback = "refuse") -> GgufRope:
    """How a GGUF of architecture `arch` says a schedule, so that llama.cpp runs exactly that.

    fallback: for a schedule of several stages, "refuse", or "static" for its last stage.
    Raises CtxextError if the schedule isn't static, or needs a table that the architecture doesn't read.
    """
    said = None if schedule.method == "none" else json.dumps(block(schedule))
    if not schedule.is_static and fallback == "static":
        schedule = schedule.static_approximation()
    if not schedule.is_static:
        static = "--fallback static writes the last stage, as good on long text and worse on short"
        raise CtxextError(
            f"llama.cpp can't run {schedule.method}: it is more than one frequency table, all that a GGUF says",
            hint=static if schedule.has_approximation else "load the folder with ctxext.load",
        )
    if arch not in READS_TABLE:
        raise CtxextError(
            f"a GGUF of architecture {arch!r} can't be written: nobody ran llama.cpp's rope for it against ours",
            hint=f"known are {', '.join(READS_TABLE)}",
        )
    keys: dict[str, str | int | float] = {
        "context_length": schedule.max_length,
        "rope.dimension_count": schedule.rope.dim,
        "rope.freq_base": schedule.rope.theta,
        "rope.scaling.type": "none",
        "rope.scaling.original_context_length": schedule.rope.trained_length,
    }
    native = _by_name(schedule, table=READS_TABLE[arch])
    if native is not None:
        return GgufRope(keys | native, None, said)
    if not READS_TABLE[arch]:
        raise CtxextError(
            f"llama.cpp reads no frequency table for {arch}, and {schedule.method} with these options needs one",
            hint="pi, ntk, theta and yarn with its default betas need none",
        )
    freqs = tuple(carrier(schedule)["long_factor"])
    scale = schedule.stages[0].attention_scale
    return GgufRope(keys | ({} if scale == 1.0 else {"rope.scaling.attn_factor": scale}), freqs, said)


def _by_name(schedule: Schedule, *, table: bool) -> dict[str, str | float] | None:
    """The keys of a scaling that llama.cpp knows by name and runs exactly, or None.

    With a table yarn is written as one: it then needs no knowledge of what a version makes of attn_factor.
    """
    native = schedule.native
    if native is None:
        return None
    kind = native["rope_type"]
    if kind == "default":
        return {"rope.freq_base": native.get("rope_theta", schedule.rope.theta)}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": native["factor"]}
    if kind == "yarn" and not table and usual_ramp(native):
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": native["factor"],
            "rope.scaling.attn_factor": attn_factor(native["attention_factor"], native["factor"]),
        }
    return None


def gguf_config(path: Path) -> dict[str, Any]:
    """What a GGUF file says about its rope, as a config.json would say it (see `config_of`)."""
    reader = read_gguf(path)
    table = tensor(reader, TENSOR)
    return config_of(metadata(reader), None if table is None else table.data.tolist())


def is_scaled(path: Path) -> bool:
    """Whether a GGUF file says anything about its rope beyond theta, which is all that transformers reads."""
    reader = read_gguf(path)
    keys = metadata(reader)
    arch = keys["general.architecture"]
    tables = any(t.name.startswith("rope_f") for t in reader.tensors)
    return tables or any(is_scaling_key(k, arch) for k in keys if keys[k] != "none")


def is_scaling_key(key: str, arch: str) -> bool:
    """Whether a GGUF key describes a rope scaling, so that a new schedule makes it stale."""
    return key.startswith(f"{arch}.rope.scaling.") or key in (f"{arch}.rope.scale_linear", BLOCK)


def config_of(metadata: Mapping[str, Any], freqs: Sequence[float] | None = None) -> dict[str, Any]:
    """A GGUF's rope in the words of a config.json, which `config.read` reads like any other.

    metadata: the file's keys and values. freqs: its rope_freqs.weight. transformers' own reader takes theta alone,
    so a scaled GGUF (every Llama 3.1) is read by it as if it weren't.
    """
    arch = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    if not isinstance(heads, int) or not hidden or not get("context_length"):
        raise CtxextError(f"this GGUF ({arch}) doesn't say its heads, width and context length in a known way")
    head_dim = get("attention.key_length") or hidden // heads
    length = get("context_length")
    config = {
        "model_type": arch,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rope_theta": _clean(get("rope.freq_base", 10000.0)),
    }
    if get("rope.dimension_count", head_dim) != head_dim:
        config["partial_rotary_factor"] = get("rope.dimension_count") / head_dim
    if BLOCK in metadata:
        return config | {"ctxext": json.loads(metadata[BLOCK])}
    scaling = _scaling_of(get, freqs, length)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling_of(get: Any, freqs: Sequence[float] | None, length: int) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "linear")
    factor = _clean(get("rope.scaling.factor") or get("rope.scale_linear") or 1.0)
    original = get("rope.scaling.original_context_length")
    scale = get("rope.scaling.attn_factor", 1.0)
    if OLD_NAMES.get(kind, kind) == "longrope" or (freqs is not None and kind == "yarn"):
        raise CtxextError(
            f"this GGUF combines rope scaling {kind!r} with tables, which llama.cpp switches by the context size",
            hint="patch the original checkpoint and export it",
        )
    if freqs is not None and (any(abs(f - 1) > 1e-6 for f in freqs) or scale != 1.0):
        # Files of Llama 3.1 carry the table and not the trained length: it is then the whole context.
        divisors = [float(f) * (factor if kind == "linear" else 1.0) for f in freqs]
        return {
            "rope_type": "longrope",
            "factor": length / (original or length),
            ORIGINAL: original or length,
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": float(scale),
        }
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            ORIGINAL: original or round(length / factor),
            "attention_factor": float(scale) * yarn_attention_scale(factor),
        }
    # A file without a type is linear to llama.cpp.
    if factor != 1.0 and kind != "none":
        return {"rope_type": "linear", "factor": factor}
    return None


def _clean(value: float) -> float:
    """A float32 of the file as the short decimal that was meant (1e-05, not 9.999999747378752e-06)."""
    return float(f"{float(value):.8g}")


def architecture(config: Mapping[str, Any], schedule: Schedule, fallback: Fallback) -> tuple[str, GgufRope]:
    """The GGUF architecture, and the schedule in its words; CtxextError where llama.cpp would differ."""
    model_type = config.get("model_type", "")
    if model_type not in ARCHITECTURES:
        raise CtxextError(
            f"can't export {model_type} as GGUF yet, only {', '.join(ARCHITECTURES)}",
            hint="convert it with llama.cpp's convert_hf_to_gguf.py, then `ctxext patch x.gguf --in-gguf`",
        )
    arch, *others = ARCHITECTURES[model_type]
    if config.get("hidden_act", "silu") != "silu":
        raise CtxextError(f"llama.cpp's {arch} uses silu, this model {config['hidden_act']}")
    if schedule.rope.dim != head_dim(config):
        raise CtxextError(f"llama.cpp's {arch} turns whole heads, this model {schedule.rope.dim} coordinates")
    window = sliding_window(config)
    if window is not None and window < schedule.max_length:
        warn(f"llama.cpp ignores the sliding window of {window} tokens: longer texts are read with full attention")
    for other in others:
        try:
            return arch, gguf_rope(schedule, arch, fallback)
        except CtxextError:
            arch = other
    return arch, gguf_rope(schedule, arch, fallback)
