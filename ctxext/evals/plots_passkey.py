"""Passkey accuracy by length and depth, drawn from the rows of result documents."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import UsageError
from ..plots import STYLE, Rows, _matplotlib, tokens

HEATMAP = ("#F0496E", "#EBB839", "#0CD79F")


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
    matplotlib = _matplotlib()
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("passkey", HEATMAP)
    lengths = sorted({row["length"] for rows in panels.values() for row in rows})
    depths = sorted({row["depth"] for rows in panels.values() for row in rows})
    columns = columns or (len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels))))
    lines = math.ceil(len(panels) / columns)
    width, height = max(2.6, 0.42 * len(lengths) + 0.5), max(2.0, 0.25 * len(depths) + 0.5)
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = matplotlib.figure.Figure(
            figsize=(columns * width + 1.3, lines * height + 0.9), layout="constrained", dpi=150
        )
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
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
        bar = figure.colorbar(image, ax=grid, aspect=30, pad=0.02, ticks=[0, 0.5, 1])
        bar.ax.set_yticklabels(["0 %", "50 %", "100 %"], fontsize=8.5)
        bar.outline.set_visible(False)
        note = "" if trained_length is None else f"; line: trained length {tokens(trained_length)}"
        figure.supxlabel(f"context length (tokens{note})", fontsize=9.5)
        figure.supylabel("depth of the key", fontsize=9.5)
        if title:
            figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure
