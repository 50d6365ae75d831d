"""Perplexity by position as a difference to the crop control: what absolute curves of good methods can't show."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from ctxext.evals.plots import Rows
from ctxext.plots import COLOURS, MARKERS, figure, tokens


def relative_curve(
    series: Mapping[str, Rows],
    control: Rows,
    *,
    trained_length: int,
    limits: tuple[float, float] = (-3, 10),
    title: str | None = None,
):
    """One line per label: how many percent its perplexity is above the control's, bucket by bucket.

    `series` and `control`: rows {"start", "end", "ppl"} over the same buckets. What is above the limits is drawn
    as a triangle on the edge. Below zero a method reads better than cropping does.
    """
    with figure(8.2, 4.2) as drawn:
        axes = drawn.add_subplot()
        places = [(row["start"] + row["end"]) / 2 for row in control]
        low, high = limits
        for (label, rows), colour, marker in zip(series.items(), cycle(COLOURS), cycle(MARKERS), strict=False):
            values = [100 * (r["ppl"] / c["ppl"] - 1) for r, c in zip(rows, control, strict=True)]
            shown = [min(v, high) for v in values]
            style = {"linestyle": "--" if label.startswith("dynamic") else "-", "linewidth": 1.8}
            axes.plot(places, shown, color=colour, marker=marker, markersize=5, label=label, **style)
            out = [p for p, v in zip(places, values, strict=True) if v >= high]
            axes.plot(out, [high] * len(out), "^", color=colour, markersize=9, clip_on=False)
        axes.axhline(0, color="black", linewidth=1.6, linestyle=(0, (5, 2)))
        axes.axvline(trained_length, color="#555555", linewidth=1, linestyle=":")
        note = {"fontsize": 8.5, "color": "#555555"}
        axes.annotate(
            f"trained length {tokens(trained_length)}", (trained_length * 0.985, low + 0.3), ha="right", **note
        )
        axes.annotate("crop control", (places[0], 0.25), **note)
        edges = sorted({row[key] for row in control for key in ("start", "end")})
        axes.set_xticks(edges, [tokens(edge) for edge in edges])
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(low, high)
        axes.set_xlabel("position of the predicted token")
        axes.set_ylabel("perplexity above cropping (%)")
        if title:
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=12)
        drawn.legend(loc="outside right upper", fontsize=9)
    return drawn
