"""Figures of the evaluators, from the JSON rows of result documents alone: what is drawn can be drawn again.

Each function takes rows as `perplexity.py` and `passkey.py` give them and returns a matplotlib Figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from ..errors import UsageError
from ..plots import COLOURS, MARKERS, figure, tokens
from ..rope import Schedule

Rows = Sequence[Mapping]
HEATMAP = ("#F0496E", "#EBB839", "#0CD79F")


def _bound(series: Mapping[str, Rows], control: Rows | None) -> float:
    """Where y is cut, so that one diverged method doesn't flatten the others: 2.5 x the median of the best values.

    The control belongs to the readable part, so it is always inside.
    """
    best: dict[float, float] = {}
    for rows in [*series.values(), *([control] if control else [])]:
        for row in rows:
            place, value = row.get("length", row.get("end")), row["ppl"]
            if value is not None and math.isfinite(value):
                best[place] = min(best.get(place, math.inf), value)
    if not best:
        raise UsageError("there is no finite perplexity to draw")
    ordered = sorted(best.values())
    bound = 2.5 * ordered[len(ordered) // 2]
    return max([bound, *(1.1 * row["ppl"] for row in control or [] if row["ppl"] is not None)])


def _line(axes, places, rows: Rows, bound: float, *, label: str, colour: str, marker: str, dashed: bool = False):
    """One series, cut at `bound`: cut points become triangles on the edge, so that divergence is seen.

    Returns what the legend shows.
    """
    from matplotlib.lines import Line2D

    values = [row["ppl"] if row["ppl"] is not None else math.inf for row in rows]
    style = {"color": colour, "linewidth": 1.8, "linestyle": (0, (5, 2)) if dashed else "-"}
    points = {"color": colour, "linestyle": "", "zorder": 4}
    # The line goes on to its first cut point, on the edge, and isn't drawn between two of them.
    cut = [value >= bound for value in values]
    shown = [
        math.nan if out and i and cut[i - 1] else min(value, bound)
        for i, (value, out) in enumerate(zip(values, cut, strict=True))
    ]
    axes.plot(places, shown, zorder=4 if dashed else 3, **style)
    inside = [(place, value) for place, value in zip(places, values, strict=True) if value < bound]
    outside = [(place, bound) for place, value in zip(places, values, strict=True) if value >= bound]
    if inside:
        axes.plot(*zip(*inside, strict=True), marker=marker, markersize=5, **points)
    if outside:
        axes.plot(*zip(*outside, strict=True), marker="^", markersize=8, clip_on=False, **points)
    if all(row.get("low") is not None and row.get("high") is not None for row in rows):
        low, high = ([min(row[key], bound) for row in rows] for key in ("low", "high"))
        axes.fill_between(places, low, high, color=colour, alpha=0.13, linewidth=0)
    return Line2D([], [], marker=marker, markersize=5, label=label, **style)


def _mark(axes, place: float | None, text: str, line: float) -> None:
    """A vertical line with its name at the top; `line` counts text lines down, so that two names don't collide."""
    if place is None:
        return
    axes.axvline(place, color="#555555", linewidth=1, linestyle=":", zorder=2)
    # Left of the line is where curves are low; at the left edge there is no room for it.
    right = axes.transAxes.inverted().transform(axes.transData.transform((place, 0)))[0] < 0.3
    name = axes.annotate(
        text,
        (place, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4 if right else -4, -12 - 13 * line),
        textcoords="offset points",
        ha="left" if right else "right",
        fontsize=8.5,
        color="#555555",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        zorder=2,
    )
    name.set_in_layout(False)  # else the layout makes room for it outside the axes


def _ticks(places: Sequence[float], log2: bool, most: int = 12) -> list[float]:
    """Those of `places` that leave room for their names, the longest always among them."""
    scaled = {place: math.log2(place) if log2 else place for place in places}
    gap = (max(scaled.values()) - min(scaled.values())) / most
    kept: list[float] = []
    for place in sorted(places, reverse=True):
        if not kept or scaled[kept[-1]] - scaled[place] >= gap * 0.999:
            kept.append(place)
    return kept[::-1]


def _perplexity(
    series: Mapping[str, Rows],
    places_of,
    *,
    xlabel: str,
    log2: bool,
    trained_length: int | None = None,
    target_length: int | None = None,
    control: Rows | None = None,
    bound: float | None = None,
    title: str | None = None,
):
    if not series or not all(series.values()):
        raise UsageError("there is nothing to draw: each series needs rows")
    from matplotlib.lines import Line2D

    bound = _bound(series, control) if bound is None else bound
    with figure(8.2, 4.2) as drawn:
        axes = drawn.add_subplot()
        handles = [
            _line(axes, places_of(rows), rows, bound, label=label, colour=colour, marker=marker)
            for (label, rows), colour, marker in zip(series.items(), cycle(COLOURS), cycle(MARKERS), strict=False)
        ]
        if control:
            black = {"label": "crop control (unpatched)", "colour": "black", "marker": "."}
            handles.append(_line(axes, places_of(control), control, bound, dashed=True, **black))
        every = [*series.values(), *([control] if control else [])]
        if log2:
            axes.set_xscale("log", base=2)
            places = {place for rows in every for place in places_of(rows)}
        else:
            places = {row[key] for rows in every for row in rows for key in ("start", "end")}
            axes.set_xlim(min(places), max(places))
        ticks = _ticks(sorted(places), log2)
        axes.set_xticks(ticks, [tokens(place) for place in ticks])
        axes.minorticks_off()
        finite = [row["ppl"] for rows in every for row in rows if row["ppl"] is not None]
        floor = min(finite)
        axes.set_ylim(max(0, floor - 0.15 * (bound - floor)), bound)
        cut = any(row["ppl"] is None or row["ppl"] >= bound for rows in series.values() for row in rows)
        _mark(axes, trained_length, f"trained length {tokens(trained_length or 0)}", line=0.5 if cut else 0)
        _mark(axes, target_length, f"target {tokens(target_length or 0)}", line=1.5 if cut else 1)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("perplexity")
        if title:
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=12 if cut else 6)
        if cut:
            edge = {"marker": "^", "markersize": 8, "linestyle": "", "color": "#7F7F7F"}
            handles.append(Line2D([], [], label=f"above {bound:.3g}", **edge))
        drawn.legend(handles=handles, loc="outside right upper", fontsize=9)
    return drawn


def ppl_curve(series: Mapping[str, Rows], **options):
    """Perplexity against length (log2): `series` maps a label to rows {"length", "ppl"[, "low", "high"]}.

    Options, as of `bucket_curve`: `trained_length` and `target_length` are marked. `control`: the rows of
    `crop_control`, a dashed black line. `title`. `bound`: where y is cut; diverged points are drawn as triangles
    on the edge. By default it is chosen so that the readable series fill the figure.
    """
    place = lambda rows: [row["length"] for row in rows]  # noqa: E731
    return _perplexity(series, place, xlabel="context length (tokens)", log2=True, **options)


def bucket_curve(series: Mapping[str, Rows], **options):
    """Perplexity by position bucket: rows {"start", "end", "ppl"[, "low", "high"]}, drawn at the bucket's middle.

    Sharper than `ppl_curve`, whose cumulative mean keeps averaging in the positions below the trained length.
    Options as of `ppl_curve`.
    """
    middle = lambda rows: [(row["start"] + row["end"]) / 2 for row in rows]  # noqa: E731
    return _perplexity(series, middle, xlabel="position of the predicted token", log2=False, **options)


def passkey_heatmap(
    panels: Mapping[str, Rows],
    *,
    trained_length: int | None = None,
    columns: int | None = None,
    title: str | None = None,
):
    """Passkey accuracy by length (x) and depth (y, 0 % on top): one panel per label, colours fixed to 0..1.

    `panels` maps a label to rows {"length", "depth", "accuracy"}. Cells carry their accuracy in percent if a panel
    has 200 or fewer; cells that weren't measured are blank. The line marks the trained length, between the columns
    that are within it and those past it.
    """
    if not panels or not all(panels.values()):
        raise UsageError("there is nothing to draw: each panel needs rows")
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("passkey", HEATMAP)
    lengths = sorted({row["length"] for rows in panels.values() for row in rows})
    depths = sorted({row["depth"] for rows in panels.values() for row in rows})
    columns = columns or (len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels))))
    lines = math.ceil(len(panels) / columns)
    width, height = max(2.6, 0.42 * len(lengths) + 0.5), max(2.0, 0.25 * len(depths) + 0.5)
    with figure(columns * width + 1.3, lines * height + 0.9, **{"axes.grid": False}) as drawn:
        grid = drawn.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        image = None
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_axis_off()
                continue
            label, rows = list(panels.items())[index]
            cells = {(row["length"], row["depth"]): row["accuracy"] for row in rows}
            values = [[cells.get((length, depth), math.nan) for length in lengths] for depth in depths]
            image = axes.imshow(values, cmap=colours, norm=Normalize(0, 1), aspect="auto", interpolation="nearest")
            for side in axes.spines.values():
                side.set_visible(False)
            axes.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
            axes.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
            axes.grid(which="minor", color="white", linewidth=1)
            axes.tick_params(which="both", length=0)
            axes.set_xticks(range(len(lengths)), [tokens(length) for length in lengths], fontsize=8.5)
            axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8.5)
            if len(lengths) * len(depths) <= 200:
                for x, length in enumerate(lengths):
                    for y, depth in enumerate(depths):
                        if (length, depth) in cells:
                            axes.text(
                                x, y, f"{100 * cells[length, depth]:.0f}", ha="center", va="center", fontsize=7
                            )
            if trained_length is not None:
                within = sum(length <= trained_length for length in lengths)
                axes.axvline(within - 0.5, color="black", linewidth=1.6, clip_on=False)
            axes.set_title(label, loc="left", fontsize=10, fontweight="bold")
        bar = drawn.colorbar(image, ax=grid, aspect=30, pad=0.02, ticks=[0, 0.5, 1])
        bar.ax.set_yticklabels(["0 %", "50 %", "100 %"], fontsize=8.5)
        bar.outline.set_visible(False)
        note = "" if trained_length is None else f"; line: trained length {tokens(trained_length)}"
        drawn.supxlabel(f"context length (tokens{note})", fontsize=9.5)
        drawn.supylabel("depth of the key", fontsize=9.5)
        if title:
            drawn.suptitle(title, fontsize=11, fontweight="bold")
    return drawn


def schedule_plot(schedules: Mapping[str, Schedule], *, title: str | None = None):
    """Frequency of each dimension pair over its original one, by label; stages of one schedule get paler to the
    first.

    1 is untouched, 1/factor is full interpolation. Grey: pairs that made less than one turn in training, so that
    positions past it would show angles that the model never saw.
    """
    if not schedules:
        raise UsageError("there is nothing to draw: no schedules")
    with figure(8.2, 3.6) as drawn:
        axes = drawn.add_subplot()
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
        drawn.legend(loc="outside right upper", fontsize=9)
    return drawn


def _some(stages):
    """Four of many stages, the last among them."""
    last = len(stages) - 1
    return [stages[round(last * share)] for share in (0, 1 / 3, 2 / 3, 1)]


def document_figure(document: Mapping[str, Any]):
    """The figure of a result document of `measure.evaluate`: of perplexity, or of passkeys."""
    label = document["schedule"]["method"] if document["schedule"] else "unpatched"
    options = {"trained_length": document["settings"]["trained_length"], "title": document["model"]}
    control = document.get("control", {})
    if document["settings"]["measure"] == "passkey":
        panels = {label: document["results"]} | ({"crop control": control["rows"]} if control else {})
        return passkey_heatmap(panels, **options)
    if "buckets" in document:
        return bucket_curve({label: document["buckets"]}, control=control.get("buckets"), **options)
    return ppl_curve({label: document["results"]}, **options)
