"""What each runtime does with a patched folder: runs it exactly, approximately, wrongly, or not at all.

The statements are in facts.yaml; here a config.json is read for what those depend on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config.architectures import architectures, is_guard
from ..config.block import read_block
from ..config.keys import OLD_NAMES, ORIGINAL, ROPE_TYPES, number, rope_parameters
from ..config.read import base_rope, read_schedule
from ..config.rope_parameters import Fallback, usual_ramp
from ..config.smollm3 import is_written
from ..config.write import write_config
from ..errors import CtxextError
from ..methods.longrope import longrope_attention_scale
from ..methods.yarn import yarn_attention_scale
from ..rope import Rope, Schedule
from .facts import Evidence, Runs, Runtime, facts, runtime
from .gguf_rope import ARCHITECTURES, architecture, gguf_rope

# How far two attention scales may be apart before logits notice in float32.
_CLOSE = 1e-4
# The same where one comes through an original length that was rounded: measured as 0.01 of a log-probability.
_ROUNDED = 1e-3


@dataclass(frozen=True)
class Verdict:
    """One runtime's answer; note: what to know or to do. runs is "unchecked" where nobody looked.

    version and evidence say against what the answer was checked, and how. command serves it.
    """

    runtime: str
    runs: Runs
    note: str
    version: str
    evidence: Evidence
    command: str

    def to_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return asdict(self)


def portability(config: Mapping[str, Any], folder: str = "FOLDER", *, native: bool = False) -> list[Verdict]:
    """What every known runtime does with a folder that has this config.json.

    native: whether it holds Mistral's own format too, which some read first if they aren't told not to.
    Raises CtxextError if the config has no rotary embedding that can be read.
    """
    found = features(config)
    block = config.get("ctxext")
    length = read_block(block).max_length if block else config.get("max_position_embeddings") or "N"
    family = str(config.get("model_type"))
    return [_verdict(known, found, family, folder, length, native) for known in facts().runtimes]


def gguf_portability(config: Mapping[str, Any], file: str) -> list[Verdict]:
    """What is known of who runs a .gguf file. config: what its header says (`gguf_rope.gguf_config`)."""
    schedule = read_schedule(config)
    length, scaled = schedule.max_length, schedule.method != "none"
    llama, stock = runtime("llama.cpp (ctxext export)"), runtime("transformers")
    theta = "its reader takes theta alone and drops the scaling; load it with ctxext.load" if scaled else ""
    folder = "give it a folder: ctxext patch writes one from a .gguf"
    return [
        Verdict("llama.cpp", "exact", "", llama.version, llama.evidence, f"llama-server -m {file} -c {length}"),
        Verdict("transformers", "misread" if scaled else "exact", theta, stock.version, "source", _reader(file)),
        *(
            Verdict(known.name, "unchecked", folder, known.version or known.date, "source", "")
            for known in facts().runtimes
            if known.program not in (stock.program, llama.program)
        ),
    ]


def _reader(file: str) -> str:
    folder, name = os.path.split(file)
    return f'AutoModelForCausalLM.from_pretrained("{folder or "."}", gguf_file="{name}")'


def verdicts(schedule: Schedule, model_type: str = "llama", fallback: Fallback = "refuse") -> list[Verdict]:
    """The same for the folder that ctxext would write for `schedule`, of a model that turns whole heads."""
    return portability(write_config(stand_in(schedule.rope, model_type), schedule, fallback=fallback))


def stand_in(rope: Rope, model_type: str = "llama") -> dict[str, Any]:
    """A config.json with this rope and nothing else of its own."""
    heads = {"hidden_size": rope.dim, "num_attention_heads": 1, "head_dim": rope.dim}
    return {
        "model_type": model_type,
        **heads,
        "num_hidden_layers": 128,
        "max_position_embeddings": rope.trained_length,
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
    }


def _verdict(
    known: Runtime, found: frozenset[str], family: str, folder: str, length: int | str, native: bool
) -> Verdict:
    rule = known.rule(found, family)
    runs: Runs = "exact" if rule is None else rule.runs
    note, evidence = ("", known.evidence) if rule is None else (rule.note, rule.evidence)
    if runs == "exact" and "last stage" in found:
        runs = "approximates"
        note = note or "the last stage at every position: as good on long text, worse on short"
    # Where the runtime as a whole was only read, no line about it was run.
    evidence = "source" if known.evidence == "source" else evidence
    command = known.command.format(folder=folder, length=length)
    command += f" {known.beside_native}" if native and known.beside_native else ""
    return Verdict(known.name, runs, note, known.version or known.date, evidence, command)


def features(config: Mapping[str, Any]) -> frozenset[str]:
    """The words that the rules know, for a config.json as it stands (its numbers' types matter).

    First the kind of scaling: default, linear, llama3, yarn, longrope, dynamic, staged, or what the config says.
    """
    keys, length = rope_parameters(config), base_rope(config).trained_length
    kind = keys["rope_type"]
    if not isinstance(kind, str):
        raise CtxextError(f"the rope type in config.json is {kind!r}, which is no name")
    # GPT-NeoX's own name for theta was never renamed; readers of v4 keys know it for that family.
    theta = config.get("rope_theta") or config.get("rotary_emb_base")
    if kind.startswith("ctxext"):
        open_ = set()
        if config.get("architectures") == architectures(config):
            open_ = {"known class"} if is_guard(theta) else {"known class", "no guard"}
        return frozenset({"staged", *_gguf(config), *open_, *(["no v4 keys"] if theta is None else [])})
    nested = any(isinstance(v, Mapping) for v in (config.get("rope_parameters") or {}).values())
    kind = (OLD_NAMES | {"none": "default"}).get(kind, kind)
    if kind not in ROPE_TYPES:
        raise CtxextError(
            f"no runtime knows the rope type {kind!r} of this config.json",
            hint="ctxext doctor says what can be done",
        )
    found = {kind, *_gguf(config), *(["per layer type"] if nested else [])}
    if kind != "default":
        found |= {"scaled", *([] if config.get("rope_parameters") else ["no v5 keys"])}
    at_top = number(config, ORIGINAL)
    original = at_top or number(keys, ORIGINAL) or length
    factor = number(keys, "factor") or length / original
    if (theta is None and keys["rope_theta"] != 10000) or (kind != "default" and not config.get("rope_scaling")):
        found.add("no v4 keys")
    if kind == "linear" and isinstance(keys.get("factor"), int):
        found.add("whole factor")
    if kind == "linear" and keys.get(ORIGINAL, length) != length:
        found.add("scaled length")
    if kind == "yarn":
        found |= _yarn(keys, factor, length, original)
    if kind == "longrope":
        found |= _longrope(keys, length, original)
        if at_top is None:
            found.add("no original at the top")
    rotates = config.get("no_rope_layers") or ()
    if not all(rotates):
        found.add("still layers")
        if any(bool(on) is ((i + 1) % 4 == 0) for i, on in enumerate(rotates)):
            found.add("not every fourth")
    schedule = read_block(config["ctxext"]) if config.get("ctxext") else None
    if schedule and not schedule.is_static and not is_written(config, schedule):
        found.add("last stage")
    return frozenset(found)


def _yarn(keys: Mapping[str, Any], factor: float, length: int, original: float) -> set[str]:
    found = set()
    if not usual_ramp(keys):
        found.add("own ramp")
    if keys.get("truncate", True) is False:
        found.add("no truncate")
    pair = keys.get("mscale") and keys.get("mscale_all_dim")
    scale = keys.get("attention_factor")
    if (scale is not None and abs(scale - yarn_attention_scale(factor)) > _CLOSE) or (scale is None and pair):
        found.add("own scale")
    if keys.get("attn_factor") is None and not (scale is None and pair):
        found.add("no attn_factor")
    if original * factor < length - 0.5:
        found.add("table too short")
    if abs(length / original / factor - 1) > _CLOSE:
        found.add("factor is not the ratio")
    return found


def _longrope(keys: Mapping[str, Any], length: int, original: float) -> set[str]:
    found = set()
    if keys.get("short_factor") != keys.get("long_factor"):
        found.add("switching")
    scale = keys.get("attention_factor")
    if scale is not None and abs(scale - longrope_attention_scale(length / original, original)) > _ROUNDED:
        found.add("scale not in the formula")
    if scale is not None and abs(scale - 1) > _CLOSE:
        found.add("own attention scale")
    if keys.get("short_mscale") is None or keys.get("long_mscale") is None:
        found.add("no mscale keys")
    return found


def _gguf(config: Mapping[str, Any]) -> set[str]:
    """Whether `ctxext export` can write this as a GGUF."""
    if config.get("model_type") not in ARCHITECTURES:
        return {"other family"}
    try:
        architecture(config, read_schedule(config), "static")
    except CtxextError:
        return {"no gguf table"}
    return set()


def serve_without_patching(
    schedule: Schedule, config: Mapping[str, Any], model: str, *, native: bool = False
) -> dict[str, str]:
    """Command lines that make a server run a static schedule on the unpatched model, by runtime.

    config: the patched config.json. native: as in `portability`. llama.cpp has flags for a few schedules only.
    """
    if not schedule.is_static:
        return {}
    over = {k: config[k] for k in ("rope_parameters", "max_position_embeddings")}
    more = f"{runtime('vLLM').beside_native} " if native else ""
    lines = {
        "vLLM": f"vllm serve {model} --max-model-len {schedule.max_length} {more}"
        f"--hf-overrides '{json.dumps(over)}'"
    }
    try:
        keys = gguf_rope(schedule, "qwen2").keys
    except CtxextError:
        return lines
    kind, rope = keys["rope.scaling.type"], schedule.rope
    flags = f"-c {schedule.max_length}"
    if kind == "none":
        flags += f" --rope-freq-base {keys['rope.freq_base']:.8g}"
    else:
        flags += f" --rope-scaling {kind} --rope-scale {keys['rope.scaling.factor']:g}"
    if kind == "yarn":
        flags += f" --yarn-orig-ctx {rope.trained_length}"
        if abs(float(keys["rope.scaling.attn_factor"]) - 1) > _CLOSE:
            return lines
    return lines | {"llama.cpp": f"llama-server -m {model}.gguf {flags}"}
