"""What a model's rope looks like, and what each method would make of it: data and a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import methods
from ..config.families import require_support
from ..config.keys import head_dim, number, rope_parameters, sliding_window
from ..config.read import read_rope, read_schedule
from ..errors import CtxextError, UsageError
from ..plots import matplotlib
from ..rope import Rope, Schedule, unpatched
from .source import display_name, is_gguf, peek, resolve
from .weights import second_copies


def wavelengths(schedule: Schedule) -> list[float | None]:
    """Tokens per turn of each frequency at the target length; None where rotation has stopped."""
    return [2 * math.pi / f if f else None for f in schedule.stages[-1].inv_freq]


def inspect_model(model: str | os.PathLike, factor: float, *, trained_length: int | None = None) -> dict[str, Any]:
    """Theta, trained length, present scaling, and per dimension the wavelength now and after each method.

    Methods that need options of their own (LongRoPE's factors) or have stages are named under "left_out". Raises
    CtxextError if the model's rope can't be read.
    """
    config = peek(model)
    require_support(config, trust_remote_code=True)
    now, runs = _as_it_is(config, trained_length)
    rope = now.rope
    made, left_out = [], []
    for name, method in methods.all_methods().items():
        try:
            schedule = method(rope, factor)
            if schedule.encoding:
                why = f"its frequencies aren't the point: {schedule.encoding.kind}"
                left_out.append({"method": name, "why": why})
            elif len(schedule.stages) == 1:
                made.append(schedule)
            else:
                left_out.append({"method": name, "why": "staged: its last stage is a static method's table"})
        except UsageError as error:
            if not method.needs:
                raise
            left_out.append({"method": name, "why": error.message})
    after = {s.method: wavelengths(s) for s in made}
    turns, before = rope.turns(), wavelengths(now)
    return {
        "model": display_name(model),
        "folder": os.fspath(model) if is_gguf(model) else str(resolve(model)),
        "model_type": config.get("model_type"),
        "head_dim": head_dim(config),
        "sliding_window": sliding_window(config),
        "rope": now.to_dict()["rope"],
        "now": runs,
        "factor": factor,
        "target_length": made[0].max_length,
        "methods": [
            {"method": s.method, "attention_scale": s.stages[-1].attention_scale, "native": s.native} for s in made
        ],
        "table": [
            {
                "i": i,
                "turns": turns[i],
                "wavelength": before[i],
                "after": {name: after[name][i] for name in after},
            }
            for i in range(rope.size)
        ],
        "left_out": left_out,
        "second_copies": [] if is_gguf(model) else [str(place) for place in second_copies(resolve(model))],
    }


def _as_it_is(config: Mapping[str, Any], trained_length: int | None) -> tuple[Schedule, dict[str, Any]]:
    """The schedule that a checkpoint runs, and what to say of it.

    For a scaling without fixed frequencies: its original rope, under the scaling's name.
    """
    try:
        now = read_schedule(config, trained_length)
        return now, {"method": now.method, "factor": now.factor, "max_length": now.max_length}
    except CtxextError:
        keys = rope_parameters(config)
        if keys["rope_type"] == "default":
            raise
        now = unpatched(read_rope(config, trained_length=trained_length, existing="replace"))
        length = int(number(config, "max_position_embeddings") or now.max_length)
        factor = number(keys, "factor") or length / now.rope.trained_length
        return now, {"method": str(keys["rope_type"]), "factor": factor, "max_length": length}


def plot_wavelengths(report: Mapping[str, Any], path: Path) -> None:
    """Draw wavelength by dimension for every method, with the trained and the target length as lines."""
    matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    rope = Rope(**report["rope"])
    index = range(rope.size)
    now = [row["wavelength"] for row in report["table"]]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), layout="constrained", sharex=True)
    above.plot(index, now, color="black", lw=2.5, label="now")
    for place, entry in enumerate(report["methods"]):
        name = entry["method"]
        values = [row["after"][name] for row in report["table"]]
        if any(v is None for v in values):
            continue  # a stopped frequency has no wavelength
        # Curves coincide over long stretches: thinner ones on top, dashed in turn, so that all can be seen.
        style = {"lw": 3 - 0.3 * place, "ls": ("-", "--", "-.")[place % 3], "label": name}
        (line,) = above.plot(index, values, **style)
        stretched = [v / n for v, n in zip(values, now, strict=True)]
        below.plot(index, stretched, color=line.get_color(), **style)
    for length, text in ((rope.trained_length, "trained"), (report["target_length"], "target")):
        above.axhline(length, color="0.5", ls="--" if text == "trained" else ":", lw=1)
        above.text(0, length * 1.08, f"{text} length {length:,}", color="0.35", fontsize=9, va="bottom")
    # From here on a frequency didn't finish one turn in training: positions beyond are angles never seen.
    unseen = sum(turns >= 1 for turns in rope.turns()) - 0.5
    for axes in (above, below):
        axes.axvspan(unseen, rope.size - 1, color="0.93", zorder=0, lw=0)
        axes.grid(alpha=0.2)
        axes.set_yscale("log", base=2)
    below.text(unseen + 0.2, 1.02, "less than one turn in training", color="0.35", fontsize=9, va="bottom")
    above.set_ylabel("wavelength (tokens per turn)")
    below.set_ylabel("stretched by")
    below.set_xlabel("dimension pair (fast to slow)")
    above.set_title(f"{report['model']}: what each method does at factor {report['factor']:g}", loc="left")
    above.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
