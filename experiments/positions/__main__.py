"""The pictures of docs/positions.md, drawn from schedules alone.

    python -m experiments.positions -o docs/pictures

clock.png: every pair of rotated coordinates is a clock hand; which part of the dial training saw, and where each
method lets the hand go. distances.png: the rotary distance that regrouping methods give a key. biases.png: what
ALiBi and T5 add to logits by distance, and the sinusoids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import methods, plots, terminal
from ctxext.methods import alibi
from ctxext.methods.sinusoidal import Sinusoids
from ctxext.methods.t5_bias import T5Bias
from ctxext.rope import Rope, Schedule
from ctxext.rope.encodings import Distances

ROPE = Rope(theta=10000.0, dim=128, trained_length=4096)
FACTOR = 4
HANDS = (0, 32, 40, 46, 52, 63)
SHOWN = ("pi", "ntk", "yarn", "self_extend", "rerope", "dual_chunk", "nope")
SEEN, UNSEEN = "#009E73", "#D55E00"


def sweep(schedule: Schedule, hand: int) -> float:
    """Radians that a hand turns between a query at the target length and its farthest key."""
    distance = schedule.max_length - 1
    if isinstance(schedule.encoding, Distances):
        distance = schedule.encoding.largest(schedule.max_length)
    return distance * schedule.stages[-1].inv_freq[hand]


def clock(rope: Rope = ROPE, factor: float = FACTOR, shown: Sequence[str] = SHOWN) -> Any:
    """Rows of dials: the model as it was, at its trained length and beyond, then each method."""
    plots.matplotlib()  # else its own error
    from matplotlib.patches import Circle, Wedge

    trained = [(rope.trained_length - 1) * f for f in rope.inv_freq()]
    rows: list[tuple[str, list[float]]] = [
        (f"trained:\n{rope.trained_length:,} tokens", trained),
        (f"unpatched:\n{round(rope.trained_length * factor):,} tokens", [factor * a for a in trained]),
    ]
    for name in shown:
        schedule = methods.schedule(rope, name, factor)
        rows.append((f"{methods.get(name).title}", [sweep(schedule, i) for i in range(rope.size)]))
    with plots.figure(1.55 * (len(HANDS) + 1), 1.42 * len(rows) + 0.9) as figure:
        figure.set_layout_engine(None)  # placed by hand below
        grid = figure.subplots(len(rows), len(HANDS), squeeze=False)
        for (label, sweeps), line in zip(rows, grid, strict=True):
            for hand, axes in zip(HANDS, line, strict=True):
                axes.set(aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.45, 1.25))
                axes.axis("off")
                seen, angle = trained[hand], sweeps[hand]
                axes.add_patch(Circle((0, 0), 1, facecolor="#F4F4F4", edgecolor="#888888", lw=0.8))
                used = min(angle, seen, 2 * math.pi)
                axes.add_patch(_wedge(Wedge, 0, used, SEEN))
                if seen < 2 * math.pi and angle > seen * (1 + 1e-9):
                    axes.add_patch(_wedge(Wedge, seen, min(angle, 2 * math.pi), UNSEEN))
                # The hand itself, at the farthest key; clocks run clockwise from the top.
                axes.plot(
                    [0, math.sin(angle)], [0, math.cos(angle)], color="black", lw=1.6, solid_capstyle="round"
                )
                turns = angle / (2 * math.pi)
                text = "stopped" if angle == 0 else f"{turns:,.0f} turns" if turns >= 10 else f"{turns:.2f} turns"
                axes.text(0, -1.38, text, ha="center", va="center", fontsize=8)
            line[0].text(-1.6, 0, label, ha="right", va="center", fontsize=9)
        for hand, axes in zip(HANDS, grid[0], strict=True):
            wave = 2 * math.pi / rope.inv_freq()[hand]
            axes.set_title(
                f"pair {hand}\nonce in {wave:,.0f}" if wave >= 10 else f"pair {hand}\nonce in {wave:.1f}",
                fontsize=9,
            )
        figure.subplots_adjust(left=0.19, right=0.99, top=0.925, bottom=0.045, wspace=0.05, hspace=0.12)
        title = f"Clock hands of RoPE (theta {rope.theta:,.0f}, {rope.dim} dimensions): how far each turns"
        figure.suptitle(f"{title} to its farthest key", x=0.01, y=0.99, ha="left", fontsize=11)
        for x, colour, text in ((0.20, SEEN, "angles that training saw"), (0.48, UNSEEN, "angles never seen")):
            figure.text(x, 0.012, "■", color=colour, fontsize=12)
            figure.text(x + 0.022, 0.015, text, fontsize=9)
    return figure


def _wedge(kind: Any, start: float, end: float, colour: str) -> Any:
    """A sector from `start` to `end` radians, clockwise from the top."""
    first, last = 90 - math.degrees(end), 90 - math.degrees(start)
    return kind((0, 0), 1, first, last, facecolor=colour, alpha=0.55, lw=0)


def distances(rope: Rope = ROPE, factor: float = FACTOR) -> Any:
    """The distance that keys are rotated by, against the true one, for the last query of the target length."""
    last = round(rope.trained_length * factor) - 1
    keys = sorted({*range(last, -1, -max(1, last // 2000)), 0}, reverse=True)
    lines = [("RoPE", [last - k for k in keys]), ("Position Interpolation", [(last - k) / factor for k in keys])]
    variants = (("self_extend", {}), ("rerope", {}), ("rerope", {"step": 2 * factor}), ("dual_chunk", {}))
    for name, options in variants:
        rule: Any = methods.schedule(rope, name, factor, **options).encoding
        label = "Leaky ReRoPE" if options else methods.get(name).title
        lines.append((label, [rule.distance(last, k) for k in keys]))
    with plots.figure(8, 4.6) as figure:
        axes = figure.subplots()
        for (label, values), colour in zip(lines, plots.COLOURS, strict=False):
            axes.plot([last - k for k in keys], values, color=colour, label=label, lw=1.6)
        axes.axhline(rope.trained_length, color="#555555", lw=1, ls=":")
        axes.text(
            last, rope.trained_length * 1.03, "seen in training: below", ha="right", fontsize=8.5, color="#555555"
        )
        axes.set_ylim(0, 2 * rope.trained_length)
        places = [rope.trained_length * i for i in range(0, int(factor) + 1)]
        axes.set_xticks(places, [plots.tokens(p) for p in places])
        places = [rope.trained_length * i // 2 for i in range(5)]
        axes.set_yticks(places, [plots.tokens(p) for p in places])
        axes.set(xlabel="true distance of the key, tokens", ylabel="distance it is rotated by")
        axes.set_title(
            f"Which distance a key is given (trained on {plots.tokens(rope.trained_length)} tokens)", loc="left"
        )
        axes.legend(fontsize=8.5)
    return figure


def biases(heads: int = 8, length: int = 160) -> Any:
    """ALiBi's lines per head, T5's buckets, and the table of sinusoids."""
    with plots.figure(12.5, 3.9) as figure:
        left, middle, waves = figure.subplots(1, 3)
        for i, slope in enumerate(alibi.slopes(heads)):
            shade = 0.15 + 0.7 * i / (heads - 1)
            left.plot([0, length], [0, -slope * length], color=(0, shade * 0.7, 0.7), lw=1.5)
            end = min(length, 20 / slope)
            place = (end + 1, max(-slope * length, -19.6) + (0.35 if slope < 1 / 200 else 0))
            left.text(*place, f"1/{round(1 / slope)}", fontsize=8, va="center")
        left.set(
            xlim=(0, length * 1.12), ylim=(-20.5, 0.5), xlabel="distance, tokens", ylabel="added to the logit"
        )
        left.set_title(f"ALiBi: minus slope times distance, {heads} heads", loc="left", fontsize=10)
        found = T5Bias(32, 128).bucket_of()
        places = range(length)
        middle.plot(places, [found[min(d, 128)] for d in places], drawstyle="steps-post", color=plots.COLOURS[1])
        middle.axvline(16, color="#555555", lw=1, ls=":")
        middle.axvline(128, color="#555555", lw=1, ls=":")
        middle.text(18, 3, "one distance each\nbelow 16", fontsize=8.5, color="#555555")
        middle.text(126, 8, "all the rest\nfrom 128 on", fontsize=8.5, color="#555555", ha="right")
        middle.set(xlabel="distance, tokens", ylabel="bucket (a learned number per head)")
        middle.set_title("T5: which distances share a number", loc="left", fontsize=10)
        width = 64
        frequencies = Sinusoids().frequencies(width)
        rows = [
            [(math.cos if j % 2 else math.sin)(p * frequencies[j // 2]) for p in range(length)]
            for j in range(width)
        ]
        image = waves.imshow(rows, aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        waves.grid(False)
        waves.set(xlabel="position, tokens", ylabel="coordinate of the embedding")
        waves.set_title("Sinusoids added to the embeddings", loc="left", fontsize=10)
        figure.colorbar(image, ax=waves, shrink=0.85)
    return figure


def main(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the pictures.")] = Path("docs/pictures"),
):
    """Draw clock.png, distances.png and biases.png."""
    for name, figure in (("clock", clock()), ("distances", distances()), ("biases", biases())):
        plots.save(figure, out / f"{name}.png")


if __name__ == "__main__":
    terminal.run(main)
