"""`ctxext demo`: every method on the embedded model at 2, 4 and 8 times its length, in three CPU minutes.

Each method is patched at exactly the factor that a length needs, so a row reads "if I wanted this length, what
would I get". Two yardsticks stand beside it: the model as it is, and the crop control.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import methods, terminal
from .options import Json

FACTORS = (1, 2, 4, 8)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for pictures, tables and cells.")] = Path(
        "out/demo"
    ),
    documents: Annotated[int, typer.Option(help="Texts of 2,048 tokens.", min=1)] = 6,
    trials: Annotated[int, typer.Option(help="Passkey trials per length and depth.", min=1)] = 8,
    json: Json = False,
) -> None:
    """Compare all methods on the embedded model at 2x, 4x and 8x: table, curve, passkey heatmap."""
    from .. import files

    report = run(out, documents=documents, trials=trials)
    files.write_json(out / "demo.json", report)
    draw(report, out)
    if json:
        print(files.dumps(report))
        return
    _print(report)
    done = f"pictures: {out / 'perplexity.png'}, {out / 'passkey.png'}; all numbers: {out / 'demo.json'}"
    terminal.say(terminal.escape(done))


def run(out: Path, *, documents: int, trials: int) -> dict[str, Any]:
    """Measure every cell that `out` doesn't hold yet. Rows by label: one per length, in the order of FACTORS."""
    from .. import text
    from ..evals.compare.cells import CROP, UNPATCHED, Cells, Variant
    from ..evals.models import TINY_TEXTS, load

    subject = load("tiny", dtype="float32")
    trained = subject.trained_length
    docs = text.documents(TINY_TEXTS, subject.tokenizer, trained * FACTORS[-1], documents)
    cells = Cells(subject, out / "cells", on_cell=lambda name: terminal.say(f"[dim]measuring {name}[/]"))
    # A model whose encoding was replaced and not trained again is lost: docs/positions.md shows it.
    ready = [n for n, method in methods.all_methods().items() if not method.needs and not method.replaces_rope]
    rows: dict[str, list[dict]] = {"unpatched": [], CROP: [], **{name: [] for name in ready}}
    for factor in FACTORS:
        length = trained * factor
        at_factor = [UNPATCHED]
        if factor > 1:
            at_factor += [Variant(f"{name} x{factor}", name, factor) for name in ready]
        ppl = cells.ppl(at_factor, docs, [length], bucket=trained, bos=None)
        found = cells.passkey(at_factor, [length], depths=DEPTHS, trials=trials, batch=trials)
        for label in ppl:
            last = ppl[label]["buckets"][-1]
            keyed = found[label]
            summary = {k: keyed["lengths"][0][k] for k in ("trials", "correct", "accuracy", "low", "high")}
            row = {"length": length, "factor": factor, "ppl": last["ppl"], "passkey": summary}
            row |= {"ppl_low": last.get("low"), "ppl_high": last.get("high"), "cells": keyed["results"]}
            rows[label.split(" x")[0]].append(row)
    first = next(iter(ppl.values()))
    return {"model": "tiny", "trained_length": trained, "settings": first["settings"], "rows": rows}


def _print(report: dict[str, Any]) -> None:
    trained = report["trained_length"]
    columns = [f"{factor}x" for factor in FACTORS[1:]]
    crop = {row["length"]: row["ppl"] for row in report["rows"]["crop control"]}
    table = []
    for label, rows in report["rows"].items():
        by_length = {row["length"]: row for row in rows}
        cells = [by_length.get(trained * factor) for factor in FACTORS[1:]]
        losing = [label != "crop control" and r["ppl"] > crop[r["length"]] for r in cells]
        shown = [f"{r['ppl']:.1f}" + (" >" if bad else "") for r, bad in zip(cells, losing, strict=True)]
        table.append([label, *shown, *(f"{r['passkey']['accuracy']:.0%}" for r in cells)])
    home = report["rows"]["unpatched"][0]
    terminal.print_table(
        f"tiny, trained on {trained} tokens: perplexity of the last {trained} tokens, and passkey, by length\n"
        f"at home ({trained} tokens): perplexity {home['ppl']:.1f}, passkey {home['passkey']['accuracy']:.0%}; "
        "> is worse than cropping",
        ("method", *(f"ppl {c}" for c in columns), *(f"passkey {c}" for c in columns)),
        table,
    )


def draw(report: dict[str, Any], out: Path) -> None:
    """perplexity.png and passkey.png in `out`."""
    from .. import plots
    from ..evals.plots import passkey_heatmap, ppl_curve

    trained, rows = report["trained_length"], report["rows"]

    def curve(label: str) -> list[dict]:
        # Every line starts at home, where no method changes anything yet.
        home = [] if rows[label][0]["factor"] == 1 else [rows["unpatched"][0]]
        return [
            {"length": r["length"], "ppl": r["ppl"], "low": r["ppl_low"], "high": r["ppl_high"]}
            for r in [*home, *rows[label]]
        ]

    shown = [label for label in rows if label != "crop control"]
    series = {label: [{**r, "low": None} for r in curve(label)] for label in shown}
    title = f"tiny: perplexity of the last {trained} tokens, by length"
    figure = ppl_curve(series, trained_length=trained, control=curve("crop control"), title=title)
    plots.save(figure, out / "perplexity.png")
    home_cells = rows["unpatched"][0]["cells"]
    panels = {
        label: [*([] if found[0]["factor"] == 1 else home_cells), *(cell for r in found for cell in r["cells"])]
        for label, found in rows.items()
    }
    figure = passkey_heatmap(panels, trained_length=trained, title="tiny: passkey by length and depth")
    plots.save(figure, out / "passkey.png")
