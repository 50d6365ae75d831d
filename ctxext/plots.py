"""Figures from the JSON rows of result documents, never from objects in memory: what is drawn can be drawn again.

Each function takes rows as `perplexity.py` and `passkey.py` give them and returns a matplotlib Figure.
matplotlib is imported inside, without pyplot, so there is no global state and no display.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from .errors import CtxextError, UsageError

Rows = Sequence[Mapping]

# Okabe and Ito's palette, without its yellow, which is too pale for lines: safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
# Of another number than the colours, so that the pair stays unique. "^" means "above the edge" here.
MARKERS = "osDvPX<>hp*"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "ctxext",  # the same rows give the same file
    "svg.fonttype": "none",
}


def _matplotlib():
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise CtxextError("plots need matplotlib", hint="pip install 'ctxext[plot]'") from error
    return matplotlib


def tokens(length: float) -> str:
    """A length as people write it: 256, 2k, 12k, 128k, 1M; exact or not shortened.

    >>> [tokens(n) for n in (256, 1000, 2048, 12288, 131072, 1048576)]
    ['256', '1000', '2k', '12k', '128k', '1M']
    """
    whole = int(length)
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if whole >= unit and whole % unit == 0:
            return f"{whole // unit}{letter}"
    return str(whole)


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
    matplotlib = _matplotlib()
    from matplotlib.lines import Line2D

    bound = _bound(series, control) if bound is None else bound
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(8.2, 4.2), layout="constrained", dpi=150)
        axes = figure.add_subplot()
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
        figure.legend(handles=handles, loc="outside right upper", fontsize=9)
    return figure


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


def save(figure, path: str | Path) -> Path:
    """Write a .png (150 dpi) or .svg; other suffixes are an error. The file doesn't carry a date."""

    path = drawable(path)
    kind = path.suffix.lower()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _matplotlib().rc_context(STYLE):
        metadata = {"Date": None} if kind == ".svg" else {"Software": None}
        figure.savefig(path, format=kind[1:], dpi=150, metadata=metadata, facecolor="white")
    return path


def drawable(path: str | Path) -> Path:
    """`path`, if its suffix is one that pictures are written with; else UsageError."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"can't draw to {str(path)!r}", hint="name it .png or .svg")
    return path
