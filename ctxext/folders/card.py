"""The model card of a patched folder: the exact configuration, the schedule, and who will run it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import __version__, methods
from ..config.smollm3 import is_written
from ..rope import Schedule
from ..runtimes.portability import Verdict
from .heads import CAUSAL, auto_class

UNTRAINED = "The weights are the base model's, byte for byte; nothing was trained."


def model_card(
    base: str,
    schedule: Schedule,
    config: Mapping[str, Any],
    *,
    verdicts: Sequence[Verdict],
    weights: str = UNTRAINED,
    left_out: Sequence[str] = (),
) -> str:
    """README.md of a patched folder, with the hub's metadata block on top.

    verdicts: who will run it. weights: where they come from. left_out: what of the base didn't come along.
    """
    method, last = methods.get(schedule.method), schedule.stages[len(schedule.stages) - 1]
    options = {k: v for k, v in schedule.params.items() if v is not None}
    keys = {k: config[k] for k in ("rope_parameters", "rope_theta", "max_position_embeddings")}
    rope = schedule.rope
    native = schedule.is_static or is_written(config, schedule)
    fallback = not native and not str(keys["rope_parameters"].get("rope_type", "")).startswith("ctxext")
    at_end = " in the last stage" if len(schedule.stages) > 1 else ""
    return f"""---
base_model: {base}
library_name: transformers
tags: [ctxext, long-context, {schedule.method}]
---

# {base}, {method.title} x{schedule.factor:g}

{base} with its rotary embedding changed by ctxext {__version__} to read
**{schedule.max_length:,} tokens** instead of {rope.trained_length:,}. {weights}

| | |
|---|---|
| method | `{schedule.method}` ({method.paper}) |
| factor | {schedule.factor:g} |
| options | `{json.dumps(options)}` |
| original rope | theta {rope.theta:g}, {rope.dim} rotary dimensions, trained on {rope.trained_length:,} tokens |
| attention scale on cos and sin | {last.attention_scale:.6g}{at_end} |

{_loading(schedule, native, fallback, auto_class(config))}{_without(left_out)}

## Who will run it

| runtime | version | | | known by |
|---|---|---|---|---|
{chr(10).join(f"| {v.runtime} | {v.version} | {v.runs} | {v.note} | {v.evidence} |" for v in verdicts)}

```text
{chr(10).join(f"{v.runtime}: {v.command}" for v in verdicts if v.runs in ("exact", "approximates"))}
```

## The schedule

{schedule_table(schedule)}

## In config.json

```json
{json.dumps(keys, indent=1)}
```
"""


def _loading(schedule: Schedule, native: bool, fallback: bool, loader: str) -> str:
    if native:
        return (
            _beyond_table(schedule)
            + " " * bool(schedule.encoding)
            + f"Load it with plain `{loader}.from_pretrained`; ctxext isn't needed."
        )
    own = "" if loader == CAUSAL else f" (as {loader} would: its head is kept)"
    if fallback:
        return (
            f"**Plain transformers runs an approximation of this.** {_beyond_table(schedule)} config.json has "
            f"what the furthest position has at every position. `ctxext.load(folder)`{own} runs the schedule "
            "itself."
        )
    return (
        f"**Plain transformers can't run this folder and stops with a KeyError.** {_beyond_table(schedule)} "
        f"Load it with `ctxext.load(folder)`{own}."
    )


def _without(left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    names = ", ".join(f"`{name}`" for name in left_out)
    return (
        f"\n\n**Left out** of the base's files: {names}. They hold the model once more and don't "
        "read config.json, so they would run without this schedule."
    )


def _beyond_table(schedule: Schedule) -> str:
    """What this schedule has that no frequency table can say."""
    parts = []
    if len(schedule.stages) > 1:
        starts = [f"{stage.start:,}" for stage in schedule.stages]
        listed = ", ".join(starts[:6]) + (" ..." if len(starts) > 6 else "")
        parts.append(
            f"It has {len(starts)} stages: a query uses the frequencies of the stage that its position is in, "
            f"from {listed} on, against all keys."
        )
    if schedule.start_tokens:
        parts.append(f"The first {schedule.start_tokens} positions keep the original angles.")
    if schedule.encoding:
        parts.append(schedule.encoding.describe(schedule.rope.trained_length))
    return " ".join(parts)


def schedule_table(schedule: Schedule) -> str:
    """Markdown: per frequency, its wavelength before and in the last stage, and its turns in training."""
    rows = [
        "| i | wavelength, original | turns in training | wavelength, now | divided by |",
        "|--:|--:|--:|--:|--:|",
    ]
    now = schedule.stages[-1].inv_freq
    for i, (before, turns, after) in enumerate(
        zip(schedule.rope.inv_freq(), schedule.rope.turns(), now, strict=True)
    ):
        was, length = (f"{2 * math.pi / f:,.1f}" if f else "stopped" for f in (before, after))
        ratio = f"{before / after:.4g}" if after else "stopped"
        rows.append(f"| {i} | {was} | {turns:.3g} | {length} | {ratio} |")
    return "\n".join(rows)
