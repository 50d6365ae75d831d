"""Table and figures of this study, from its JSON alone: means over seeds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext import plots
from experiments import tables

LABELS = {
    "rope": "RoPE",
    "sinusoidal": "sinusoidal",
    "alibi": "ALiBi",
    "t5_bias": "T5 bias",
    "nope": "NoPE",
    "drope": "RoPE→DroPE",
}


def interval(values: list[float]) -> dict[str, float]:
    """Mean and, with two values or more, the 95 % interval of the mean by Student's t.

    >>> interval([1.0, 3.0])["mean"]
    2.0
    """
    from scipy import stats

    mean = sum(values) / len(values)
    answer = {"mean": mean, "seeds": len(values)}
    if len(values) > 1:
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        answer |= {"low": float(mean - half), "high": float(mean + half)}
    return answer


def summarise(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{"trained_length", "series": {label: {"ppl"|"passkey"|"copy": [{"length", "mean", ...}]}}, "loss", ...}.

    Perplexities are averaged as nats.
    """
    series: dict[str, dict[str, list]] = {}
    loss, temperatures = {}, {}
    trained, environment = 0, {}
    for name, seeds in found.items():
        runs = list(seeds.values())
        trained, environment = runs[0]["trained_length"], runs[0].get("environment", {})
        label = LABELS.get(name, name)
        loss[label] = [
            {"step": steps[0][0], **interval([s[1] for s in steps])}
            for steps in zip(*(r["loss"] for r in runs), strict=True)
        ]
        temperatures |= {
            f"{label}, seed {seed}": run["temperature"] for seed, run in seeds.items() if "temperature" in run
        }
        for variant in runs[0]["variants"]:
            shown = label if variant == "as trained" else f"{label}, {variant}"
            shown = variant if variant == "crop control" else shown
            series[shown] = {}
            for measure, rows in runs[0]["variants"][variant].items():
                key = {"ppl": "ppl"}.get(measure, "accuracy")
                points = []
                for i, row in enumerate(rows):
                    values = [run["variants"][variant][measure][i][key] for run in runs]
                    point = interval([math.log(v) for v in values] if measure == "ppl" else values)
                    if measure == "ppl":
                        point = {k: math.exp(v) if k != "seeds" else v for k, v in point.items()}
                    points.append({"length": row["length"], **point})
                series[shown][measure] = points
    return {
        "trained_length": trained,
        "series": series,
        "loss": loss,
        "temperature": temperatures,
        "environment": environment,
    }


def table(
    summary: Mapping[str, Any], labels: Mapping[str, str] | None = None, multiples: Sequence[float] | None = None
) -> str:
    """Markdown, one row per encoding and rescue: means over seeds, with half of the 95 % interval.

    labels: the series to show and their names; all if None. multiples: of the trained length; all if None.
    """
    trained = summary["trained_length"]
    lengths = sorted({p["length"] for s in summary["series"].values() for p in s["ppl"]})
    lengths = [n for n in lengths if multiples is None or n / trained in multiples]
    asked = {"ppl": lengths, "passkey": [n for n in lengths if n >= trained], "copy": lengths}
    heads = [
        f"{f'{measure} ' if n == wanted[0] else ''}{n / trained:g}x"
        for measure, wanted in asked.items()
        for n in wanted
    ]
    rows = []
    for label, name in (labels or {label: label for label in summary["series"]}).items():
        cells = []
        for measure, wanted in asked.items():
            points = {p["length"]: p for p in summary["series"][label].get(measure, [])}
            cells += [_cell(measure, points.get(n)) for n in wanted]
        rows.append([name, *cells])
    return tables.table(["", *heads], rows)


def _cell(measure: str, point: Mapping[str, float] | None) -> str:
    if point is None:
        return ""
    half = (point["high"] - point["low"]) / 2 if "low" in point else None
    if measure == "ppl":
        digits = 1 if point["mean"] < 1000 else 0
        return f"{point['mean']:.{digits}f}" + ("" if half is None else f" ±{half:.{digits}f}")
    return f"{point['mean']:.0%}" if half is None else f"{100 * point['mean']:.0f} ±{100 * half:.0f}%"


def docs_tables(summary: Mapping[str, Any]) -> tuple[str, str]:
    """The two tables of docs/positions.md: the encodings, and the RoPE model as it is rescued."""
    names = list(summary["series"])
    own = {n: n for n in names if not n.startswith("RoPE, ")}
    rescued = {n: f"`{n.removeprefix('RoPE, ')}`" for n in names if n.startswith("RoPE, ")}
    rescued = {n: shown.strip("`") if shown == "`searched`" else shown for n, shown in rescued.items()}
    return table(summary, own, (1, 2, 4, 8)), table(summary, rescued, (1.5, 2, 4, 8))


def draw(summary: Mapping[str, Any], out: Path) -> None:
    """encodings.png, rescued.png and loss.png in `out`."""
    series = summary["series"]
    own = {label: s for label, s in series.items() if ", " not in label}
    rescued = {label.removeprefix("RoPE, "): s for label, s in series.items() if label.startswith("RoPE, ")}
    if "RoPE" in series:
        rescued = {"RoPE": series["RoPE"], **rescued}
        rescued |= {k: series[k] for k in ("crop control", "ALiBi", "RoPE→DroPE, with temperature") if k in series}
    title = f"Trained on {summary['trained_length']} tokens, tested on up to 8 times as many"
    plots.save(_panels(own, summary["trained_length"], title), out / "encodings.png")
    if rescued:
        title = f"The RoPE model rescued without training (trained on {summary['trained_length']} tokens)"
        plots.save(_panels(rescued, summary["trained_length"], title), out / "rescued.png")
    plots.save(_losses(summary["loss"]), out / "loss.png")


def _panels(series: Mapping[str, Mapping[str, list]], trained: int, title: str):
    with plots.figure(12.5, 4.4) as figure:
        axes = figure.subplots(1, 3)
        shown = (
            ("ppl", "perplexity of the last 64 tokens"),
            ("passkey", "passkey accuracy"),
            ("copy", "accuracy of copying half of it"),
        )
        handles = {}
        best = min(p["mean"] for s in series.values() for p in s["ppl"])
        worst = min(12 * best, 1.15 * max(p["mean"] for s in series.values() for p in s["ppl"]))
        drawn = [label for label in series if label != "crop control"]
        for panel, (measure, name) in zip(axes, shown, strict=True):
            for label, measures in series.items():
                points = measures.get(measure)
                if not points:
                    continue
                control = label == "crop control"
                i = 0 if control else drawn.index(label)
                colour = "#000000" if control else plots.COLOURS[i % len(plots.COLOURS)]
                marker = plots.MARKERS[i % len(plots.MARKERS)]
                places = [p["length"] for p in points]
                values = [min(p["mean"], worst) if measure == "ppl" else p["mean"] for p in points]
                style = {"color": colour, "marker": marker, "markersize": 5, "lw": 1.7}
                (line,) = panel.plot(
                    places, values, ls=(0, (5, 2)) if control else "-:"[i // 7 % 2], label=label, **style
                )
                handles.setdefault(label, line)
                beyond = [(x, worst) for x, p in zip(places, points, strict=True) if p["mean"] > worst]
                if measure == "ppl" and beyond:
                    panel.plot(*zip(*beyond, strict=True), "^", ms=8, color=colour, clip_on=False, zorder=5)
                # The bands of more series than that hide each other; the table has them all.
                if len(series) <= 7 and all("low" in p for p in points):
                    top = worst if measure == "ppl" else 1.0
                    low = [min(max(p["low"], 0), top) for p in points]
                    high = [min(p["high"], top) for p in points]
                    panel.fill_between(places, low, high, color=colour, alpha=0.12, lw=0)
            lengths = sorted({p["length"] for s in series.values() for p in s.get(measure, [])})
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [plots.tokens(n) for n in lengths])
            panel.axvline(trained, color="#555555", lw=1, ls=":")
            panel.set(xlabel="length, tokens", ylabel=name)
            if measure == "ppl":
                panel.set_yscale("log")
                panel.set_ylim(best * 0.9, worst)
                ticks = [t for t in (10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500) if best * 0.9 <= t <= worst]
                panel.set_yticks(ticks, [str(t) for t in ticks])
                panel.minorticks_off()
            else:
                panel.set_ylim(-0.03, 1.03)
        figure.suptitle(title, x=0.01, ha="left")
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(7, len(handles)))
    return figure


def _losses(loss: Mapping[str, list]):
    with plots.figure(8, 4.2) as figure:
        axes = figure.subplots()
        for i, (label, rows) in enumerate(loss.items()):
            colour = plots.COLOURS[i % len(plots.COLOURS)]
            steps = [r["step"] for r in rows]
            axes.plot(steps, [r["mean"] for r in rows], color=colour, label=label, lw=1.5)
            if all("low" in r for r in rows):
                axes.fill_between(
                    steps, [r["low"] for r in rows], [r["high"] for r in rows], color=colour, alpha=0.12
                )
        axes.set(xlabel="step", ylabel="training loss, nats per token", title="Training loss by encoding")
        axes.legend()
    return figure
