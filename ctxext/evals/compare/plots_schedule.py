"""What each schedule does to the frequencies, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from ...errors import UsageError
from ...plots import COLOURS, STYLE, _matplotlib
from ...rope import Schedule


def schedule_plot(schedules: Mapping[str, Schedule], *, title: str | None = None):
    """Frequency of each dimension pair over its original one, by label; stages of one schedule get paler to the
    first.

    1 is untouched, 1/factor is full interpolation. Grey: pairs that made less than one turn in training, so that
    positions past it would show angles that the model never saw.
    """
    if not schedules:
        raise UsageError("there is nothing to draw: no schedules")
    matplotlib = _matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(8.2, 3.6), layout="constrained", dpi=150)
        axes = figure.add_subplot()
        lowest = 1.0
        for index, ((label, schedule), colour) in enumerate(zip(schedules.items(), cycle(COLOURS), strict=False)):
            # Curves coincide over long stretches: thinner ones on top, dashed in turn, so that all can be seen.
            style = {
                "color": colour,
                "linewidth": max(1.2, 3 - 0.4 * index),
                "linestyle": ("-", "--", "-.")[index % 3],
            }
            original = schedule.rope.inv_freq()
            stages = schedule.stages if len(schedule.stages) <= 4 else _some(schedule.stages)
            for number, stage in enumerate(stages):
                ratios = [now / then if then else 1.0 for now, then in zip(stage.inv_freq, original, strict=True)]
                lowest = min([lowest, *(ratio for ratio in ratios if ratio > 1e-6)])
                alpha = 1.0 if number == len(stages) - 1 else 0.25 + 0.4 * number / len(stages)
                name = label if number == len(stages) - 1 else None
                axes.plot(range(len(ratios)), ratios, alpha=alpha, label=name, **style)
        rope = next(iter(schedules.values())).rope
        unseen = sum(turns >= 1 for turns in rope.turns()) - 0.5
        axes.axvspan(unseen, rope.size - 1, color="0.93", zorder=0, linewidth=0)
        axes.set_yscale("log", base=2)
        axes.set_ylim(lowest / 1.15, 1.15)
        ticks = [2.0**-i for i in range(12) if 2.0**-i >= lowest / 1.15]
        axes.set_yticks(ticks, [f"1/{round(1 / tick)}" if tick < 1 else "1" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("dimension pair (fast to slow); grey: less than one turn in training")
        axes.set_ylabel("frequency over the original's")
        if title:
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        figure.legend(loc="outside right upper", fontsize=9)
    return figure


def _some(stages):
    """Four of many stages, the last among them."""
    last = len(stages) - 1
    return [stages[round(last * share)] for share in (0, 1 / 3, 2 / 3, 1)]
