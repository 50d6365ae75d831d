"""`ctxext demo`: every method on the embedded model; a thin command over `evals/demo.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import terminal
from ..plots import matplotlib
from .eval_options import emit
from .options import Json


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
    from ..evals import demo as every_method

    matplotlib()  # or several minutes are measured for nothing
    report = every_method.measure(out, documents=documents, trials=trials)
    files.write_json(out / "demo.json", report)
    every_method.draw(report, out)
    if json:
        emit(report)
        return
    _print(report)
    done = f"pictures: {out / 'perplexity.png'}, {out / 'passkey.png'}; all numbers: {out / 'demo.json'}"
    terminal.say(terminal.escape(done))


def _print(report: dict[str, Any]) -> None:
    from ..evals.compare.cells import CROP

    trained = report["trained_length"]
    crop = {row["length"]: row["ppl"] for row in report["rows"][CROP]}
    columns = [f"{length // trained}x" for length in crop]
    table = []
    for label, rows in report["rows"].items():
        by_length = {row["length"]: row for row in rows}
        cells = [by_length[length] for length in crop]
        losing = [label != CROP and r["ppl"] > crop[r["length"]] for r in cells]
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
