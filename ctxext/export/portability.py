"""What each runtime does with a patched folder: runs it exactly, approximately, wrongly, or not at all.

One table, keyed by how the schedule is written into config.json. Versions are those that the statement was
checked against; "source" means that the code was read but not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hf_config import native_parameters
from ..rope import Schedule
from ..smollm3 import expressible


@dataclass(frozen=True)
class Verdict:
    """One runtime's answer. runs: "exact", "approximates", "misread" or "refused"; note: what to know or to do."""

    runtime: str
    runs: str
    note: str


_RUNTIMES = (
    "transformers 5.24",
    "vLLM 0.33",
    "SGLang 0.5.23",
    "llama.cpp",
    "MLX-LM (source)",
    "ExLlamaV3 (source)",
)
_EXACT = ("exact", "")
_NEEDS_FREQS = ("misread", "its converter drops the factors: write rope_freqs.weight into the GGUF")
_BY_TYPE = {
    "default": (_EXACT,) * 6,
    "linear": (_EXACT,) * 6,
    "llama3": (_EXACT,) * 6,
    "yarn": (_EXACT,) * 6,
    "yarn, options changed": (
        _EXACT,
        _EXACT,
        _EXACT,
        ("misread", "reads no betas, truncate or attention_factor from the file: write rope_freqs.weight"),
        ("misread", "ignores truncate and attention_factor"),
        _EXACT,
    ),
    "longrope": (_EXACT, _EXACT, _EXACT, _NEEDS_FREQS, _EXACT, _EXACT),
    "longrope, own attention scale": (
        _EXACT,
        _EXACT,
        _EXACT,
        _NEEDS_FREQS,
        ("misread", "derives the attention scale from the two lengths alone"),
        ("misread", "derives the attention scale from the two lengths alone"),
    ),
}
_DEFAULT_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def verdicts(schedule: Schedule, model_type: str = "llama", fallback: str = "refuse") -> list[Verdict]:
    """What each known runtime does with the folder that ctxext writes for `schedule`."""
    if not schedule.is_static and fallback == "static":
        found = verdicts(schedule.static_approximation(), model_type)
        note = "what the furthest position has at every position: as good on long text, worse on short"
        return [Verdict(v.runtime, "approximates" if v.runs == "exact" else v.runs, v.note or note) for v in found]
    if expressible(schedule, model_type):
        every = schedule.unrotated.every == 4
        answers = (
            _EXACT,
            ("exact", "by its Transformers backend (source)"),
            ("refused", "not checked"),
            _EXACT
            if every
            else ("misread", "its SmolLM3 stops every fourth layer, whatever the config says (source)"),
            ("exact", "as SmolLM3 (source)"),
            ("refused", "not checked"),
        )
        return [Verdict(name, *answer) for name, answer in zip(_RUNTIMES, answers, strict=True)]
    if not schedule.is_static:
        refused = ("refused", "plain transformers stops with a KeyError; load with ctxext.load")
        other = ("refused", "knows no such rope type; a runtime that ignores unknown types would misread it")
        return [Verdict(_RUNTIMES[0], *refused), *(Verdict(name, *other) for name in _RUNTIMES[1:])]
    keys = native_parameters(schedule, model_type)
    kind = keys["rope_type"]
    if kind == "yarn" and (
        any(keys[k] != v for k, v in _DEFAULT_YARN.items()) or abs(keys.get("attn_factor", 1.0) - 1) > 1e-9
    ):
        kind = "yarn, options changed"
    if kind == "longrope" and keys["attention_factor"] != 1.0:
        kind = "longrope, own attention scale"
    return [Verdict(name, *answer) for name, answer in zip(_RUNTIMES, _BY_TYPE[kind], strict=True)]
