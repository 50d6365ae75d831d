"""Two pictures of a search: what it found for its tokens, and the factors over dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import methods, plots
from ..rope import Rope, Schedule
from .space import SEEDS, factors_of

_BLUE, _, _GREEN, _PINK, _, _ORANGE, _GREY = plots.COLOURS
COLOURS = {"pi": _GREY, "ntk": _ORANGE, "yarn": _GREEN, "searched": _BLUE, "short": _PINK}


def draw(folder: Path, report: Mapping[str, Any], rope: Rope, factor: float) -> None:
    """fitness.png and factors.png in `folder`. Raises CtxextError without matplotlib."""
    plots.save(_fitness(report), folder / "fitness.png")
    plots.save(_factors(Schedule.from_dict(report["schedule"]), rope, factor), folder / "factors.png")


def _fitness(report: Mapping[str, Any]) -> Any:
    with plots.figure(6.5, 4) as figure:
        axes = figure.add_subplot()
        tokens, best = zip(*report["history"], strict=True)
        spent = report["tokens"] - report["tokens_short"]
        axes.step(
            [*tokens, spent], [*best, best[-1]], where="post", color=COLOURS["searched"], label="best so far"
        )
        # PI is often so far off that it would flatten all the rest.
        top = 1.25 * min(report["seeds"].values())
        for name in SEEDS:
            if report["seeds"].get(name, top) < top:
                axes.axhline(report["seeds"][name], color=COLOURS[name], ls=":", label=name)
        axes.set(xlabel="model tokens", ylabel="perplexity of the search documents", xlim=(0, None))
        axes.set_ylim(top=top)
        axes.legend()
    return figure


def _factors(schedule: Schedule, rope: Rope, factor: float) -> Any:
    with plots.figure(6.5, 4) as figure:
        axes = figure.add_subplot()
        for name in SEEDS:
            known = factors_of(methods.schedule(rope, name, factor))
            axes.plot(known, color=COLOURS[name], ls="--", lw=1.3, label=name)
        axes.plot(factors_of(schedule), "o-", color=COLOURS["searched"], ms=4, label="searched")
        if len(schedule.stages) > 1:
            short = [f / g for f, g in zip(rope.inv_freq(), schedule.stages[0].inv_freq, strict=True)]
            axes.plot(
                short, "s-", color=COLOURS["short"], ms=3, lw=1, label=f"below {rope.trained_length:,} tokens"
            )
        axes.set(xlabel="frequency, fast to slow", ylabel="divided by", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        title = f"{schedule.start_tokens} start tokens" if schedule.start_tokens else "no start tokens"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend()
        axes.grid(which="both")
    return figure
