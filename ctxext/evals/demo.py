"""Every method on the embedded model at 2, 4 and 8 times its length, in three CPU minutes.

Each method is patched at exactly the factor that a length needs, so a row reads "if I wanted this length, what
would I get". Two yardsticks stand beside it: the model as it is, and the crop control.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import methods, plots, terminal, text
from .compare.cells import CROP, UNPATCHED, Cells, Variant
from .models import TINY_TEXTS, load
from .plots import passkey_heatmap, ppl_curve

FACTORS = (1, 2, 4, 8)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def measure(out: Path, *, documents: int, trials: int) -> dict[str, Any]:
    """Measure every cell that `out` doesn't hold yet: {"model", "trained_length", "settings", "rows"}.

    Rows by label: one per length, in the order of FACTORS.
    """
    subject = load("tiny", dtype="float32")
    trained = subject.trained_length
    docs = text.documents(TINY_TEXTS, subject.tokenizer, trained * FACTORS[-1], documents)
    cells = Cells(subject, out / "cells", on_cell=lambda name: terminal.say(f"[dim]measuring {name}[/]"))
    # A model whose encoding was replaced and not trained again is lost: docs/positions.md shows it.
    ready = [n for n, method in methods.all_methods().items() if not method.needs and not method.replaces_rope]
    rows: dict[str, list[dict]] = {"unpatched": [], CROP: [], **{name: [] for name in ready}}
    settings: dict[str, Any] = {}
    for factor in FACTORS:
        length = trained * factor
        at_factor = [UNPATCHED]
        if factor > 1:
            at_factor += [Variant(f"{name} x{factor}", name, factor) for name in ready]
        ppl = cells.ppl(at_factor, docs, [length], bucket=trained, bos=None)
        found = cells.passkey(at_factor, [length], depths=DEPTHS, trials=trials, batch=trials)
        settings = next(iter(ppl.values()))["settings"]
        for label in ppl:
            last = ppl[label]["buckets"][-1]
            keyed = found[label]
            summary = {k: keyed["lengths"][0][k] for k in ("trials", "correct", "accuracy", "low", "high")}
            row = {"length": length, "factor": factor, "ppl": last["ppl"], "passkey": summary}
            row |= {"ppl_low": last.get("low"), "ppl_high": last.get("high"), "cells": keyed["results"]}
            rows[label.split(" x")[0]].append(row)
    return {"model": "tiny", "trained_length": trained, "settings": settings, "rows": rows}


def draw(report: dict[str, Any], out: Path) -> None:
    """perplexity.png and passkey.png in `out`."""
    trained, rows = report["trained_length"], report["rows"]

    def curve(label: str) -> list[dict]:
        # Every line starts at home, where no method changes anything yet.
        home = [] if rows[label][0]["factor"] == 1 else [rows["unpatched"][0]]
        return [
            {"length": r["length"], "ppl": r["ppl"], "low": r["ppl_low"], "high": r["ppl_high"]}
            for r in [*home, *rows[label]]
        ]

    shown = [label for label in rows if label != CROP]
    series = {label: [{**r, "low": None} for r in curve(label)] for label in shown}
    title = f"tiny: perplexity of the last {trained} tokens, by length"
    figure = ppl_curve(series, trained_length=trained, control=curve(CROP), title=title)
    plots.save(figure, out / "perplexity.png")
    home_cells = rows["unpatched"][0]["cells"]
    panels = {
        label: [*([] if found[0]["factor"] == 1 else home_cells), *(cell for r in found for cell in r["cells"])]
        for label, found in rows.items()
    }
    figure = passkey_heatmap(panels, trained_length=trained, title="tiny: passkey by length and depth")
    plots.save(figure, out / "passkey.png")
