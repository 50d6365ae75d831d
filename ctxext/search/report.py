"""What is said about a finished search: beside which schedules it is set, and the model card's section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import methods
from ..rope import Schedule, unpatched
from .options import Subject
from .space import SEEDS


def compared(subject: Subject, final: Schedule, factor: float) -> dict[str, Schedule]:
    """The schedules to measure, by name: the model as it was, PI, NTK and YaRN in full, the result.

    If the result is more than a frequency table, what plain transformers makes of it too. The first is the
    original rope if what the model ran is replaced and can't be told by a schedule.
    """
    rope = subject.rope
    found = {"as it was": subject.as_it_is} if subject.as_it_is else {"unpatched": unpatched(rope)}
    found |= {name: methods.schedule(rope, name, factor) for name in SEEDS if name != "ntk" or rope.dim >= 4}
    found["searched"] = final
    if not final.is_static:
        found["searched, in plain transformers"] = final.static_approximation()
    return found


def lost(report: Mapping[str, Any]) -> str | None:
    """A sentence on what plain transformers and servers do without, with its price; None if nothing."""
    by_name = {row["schedule"]: row for row in report["rows"]}
    plain, whole = by_name.get("searched, in plain transformers"), by_name["searched"]
    if plain is None:
        return None
    schedule = report["schedule"]
    parts = [f"its {schedule['start_tokens']} start tokens"] if schedule["start_tokens"] else []
    parts += ["its short factors"] if len(schedule["stages"]) > 1 else []
    if report["fallback"] == "refuse":
        return f"plain transformers refuses it, because of {' and '.join(parts)}; ctxext.load runs all of it"
    return (
        f"plain transformers runs it without {' and '.join(parts)}: {plain['long']:.3f} instead of "
        f"{whole['long']:.3f} on long text, {plain['short']:.3f} instead of {whole['short']:.3f} on short text; "
        "ctxext.load runs all of it"
    )


def measure(report: Mapping[str, Any]) -> str:
    """The name of the figures at the target length."""
    needle = report["settings"]["objective"] == "needle"
    return "perplexity of the needles' keys" if needle else "perplexity"


def card_section(report: Mapping[str, Any]) -> str:
    """The model card's section on the search, Markdown."""
    settings, lengths, without = report["settings"], report["lengths"], lost(report)
    rows = "\n".join(f"| {r['schedule']} | {r['long']:.3f} | {r['short']:.3f} |" for r in report["rows"])
    return f"""
## How the factors were found

By `ctxext search`, strategy {settings["strategy"]}, {report["tokens"]:,} model tokens, seed {settings["seed"]};
everything that was tried is in search/log.jsonl. On {report["checked_on"]}:

| schedule | {measure(report)} at {lengths["long"]:,} tokens | perplexity at {lengths["short"]:,} |
|---|--:|--:|
{rows}
{f"{chr(10)}Mind that {without}.{chr(10)}" if without else ""}"""
