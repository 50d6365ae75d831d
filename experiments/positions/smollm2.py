"""Position encodings on SmolLM2-135M, no training: what a replaced one does to it, and what regrouping gives.

    python -m experiments.positions.smollm2 -o out/smollm2-positions

Two questions. How lost is a RoPE model right after its rotation was replaced (ALiBi, sinusoids, none)? And do
methods that need no training, Self-Extend, ReRoPE and dual-chunk attention, read 12k and 16k better than YaRN?
The first document of `experiments.smollm2` is read, so that its stored results stand beside these. About 12
minutes on one core.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import terminal
from ctxext.folders.source import ModelDtype
from experiments.smollm2 import material
from experiments.smollm2.material import BUCKET, FACTOR, LENGTHS
from experiments.tables import short, table

REPLACED = ("alibi", "sinusoidal", "nope")
REPLACED_LENGTHS = (2048, 10240)
REGROUPED = ("dual_chunk", "self_extend")
BESIDE = ("unpatched", "crop control", "yarn x2", "ntk x2", "dynamic_yarn x2", "dynamic_ntk x2")
STORED = Path(__file__).parents[1] / "results" / "smollm2" / "results.json"


def measure(out: Path, *, methods: list[str], dtype: ModelDtype) -> dict[str, dict[str, Any]]:
    """Perplexity documents by method; those that `out` has aren't measured again."""
    from ctxext import files, text
    from ctxext.evals import perplexity, results

    subject = material.subject(dtype)
    bos = text.bos_id(subject.tokenizer)
    docs = material.stretches(out, subject.tokenizer, 1)
    found = {}
    for method in methods:
        path = out / f"{method}.json"
        if not path.is_file():
            terminal.say(f"measuring {method}")
            lengths = REPLACED_LENGTHS if method in REPLACED else LENGTHS
            ids = [docs.ids[0][: max(lengths)]]
            subject.patch(method, FACTOR)
            curve = perplexity.prefix_curve(subject.model, ids, lengths, bucket=BUCKET, bos=bos)
            document = results.result_document(
                material.NAME,
                subject.description(),
                curve.settings,
                curve.rows,
                model=subject.model,
                data_sha256=docs.sha256,
                buckets=curve.buckets,
            )
            files.write_json(path, document)
            subject.unpatch()
        found[method] = files.read_json(path)
    return found


def tables(found: dict[str, dict], stored: dict[str, dict]) -> str:
    """Perplexity by position, with the stored rows of the same document beside."""
    rows = []
    for label in BESIDE:
        document = stored[label]
        sums = document["per_document"][0]["bucket_nll"]
        counts = [b["tokens"] // len(document["per_document"]) for b in document["buckets"]]
        rows.append([label, *(f"{math.exp(nll / n):.2f}" for nll, n in zip(sums, counts, strict=True))])
    for method, document in found.items():
        cells = [short(b["ppl"]) for b in document["buckets"]]
        rows.append([f"`{method} x{FACTOR}`", *cells, *[""] * (8 - len(cells))])
    return table(["perplexity at position", *(f"{n}k" for n in range(2, 17, 2))], rows)


def main(
    out: Annotated[Path, typer.Option("-o", "--out")] = Path("out/smollm2-positions"),
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join((*REPLACED, *REGROUPED)),
    dtype: ModelDtype = "bfloat16",
) -> None:
    """Measure and print the table."""
    from ctxext import files

    found = measure(out, methods=methods.split(","), dtype=dtype)
    shown = tables(found, files.read_json(STORED)["ppl"])
    (out / "tables.md").write_text(shown, encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    terminal.run(main)
