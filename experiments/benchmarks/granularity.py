"""How fine should stages be? Perplexity of the embedded model up to 8 times its length, by tokens per stage.

    python -m experiments.benchmarks.granularity [-o FOLDER]

Beside the staged schedules: the static method at the largest factor, the unpatched model and the crop control. A
figure is the perplexity of the tokens at those positions, over 6 held-out texts of 2,048 tokens.
"""

import argparse
import itertools
import math
from pathlib import Path

import torch

import ctxext
from ctxext import plots
from ctxext.evals.models import TINY_TEXTS, load
from ctxext.evals.perplexity import crop_control
from ctxext.files import write_json
from ctxext.live.head import token_nll
from ctxext.text import documents
from experiments.tables import table

TRAINED, FACTOR = 256, 8
EDGES = (1, 256, 512, 1024, 2048)
STAGES = (8, 16, 32, 64, 128, 256, 512)


def by_position(scores: list[torch.Tensor]) -> list[float]:
    """Perplexity between consecutive edges; scores[d][i] is the NLL of token i + 1 of document d."""
    total = torch.stack(scores).double()
    return [math.exp(total[:, a - 1 : b - 1].mean()) for a, b in itertools.pairwise(EDGES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    subject = load("tiny", dtype="float32")
    docs = documents(TINY_TEXTS, subject.tokenizer, EDGES[-1], 6)

    def measure(method: str | None, **options) -> list[float]:
        subject.unpatch()
        if method:
            ctxext.patch(subject.model, method, FACTOR, **options)
        return by_position([token_nll(subject.model, ids) for ids in docs.ids])

    rows = [{"schedule": "unpatched", "stage": None, "ppl": measure(None)}]
    control = crop_control(subject.model, docs.ids, EDGES[1:], TRAINED, bucket=TRAINED, stride=16)
    sums = [(b["start"], b["nll"] * b["tokens"], b["tokens"]) for b in control.buckets]
    crop = []
    for low, high in itertools.pairwise(EDGES):
        inside = [(nll, n) for start, nll, n in sums if low - 1 <= start < high - 1]
        crop.append(math.exp(sum(nll for nll, _ in inside) / sum(n for _, n in inside)))
    rows.append({"schedule": "crop control", "stage": None, "ppl": crop})
    for method in ("ntk", "yarn"):
        rows.append({"schedule": f"{method} x{FACTOR}", "stage": None, "ppl": measure(method)})
        for stage in STAGES:
            ppl = measure(f"dynamic_{method}", granularity=stage)
            rows.append({"schedule": f"dynamic_{method}", "stage": stage, "ppl": ppl})
    head = ["schedule", "tokens per stage", *(f"up to {e}" for e in EDGES[1:])]
    print(table(head, ([r["schedule"], str(r["stage"] or ""), *(f"{p:.1f}" for p in r["ppl"])] for r in rows)))
    if args.out:
        write_json(args.out / "granularity.json", {"edges": EDGES, "results": rows}, indent=1)
        draw(rows, args.out / "granularity.png")


def draw(rows: list[dict], path: Path) -> None:
    """Perplexity against tokens per stage, one line per method and range of positions."""
    with plots.figure(9, 3.6) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        for axes, method in zip(panels, ("ntk", "yarn"), strict=True):
            staged = [r for r in rows if r["schedule"] == f"dynamic_{method}"]
            for i, colour in ((1, "#0072B2"), (2, "#D55E00"), (3, "#009E73")):
                label = f"positions {EDGES[i]}-{EDGES[i + 1]}"
                axes.plot(
                    [r["stage"] for r in staged], [r["ppl"][i] for r in staged], "o-", color=colour, label=label
                )
                static = next(r for r in rows if r["schedule"] == f"{method} x{FACTOR}")["ppl"][i]
                axes.axhline(static, color=colour, ls=":", lw=1.2)
            axes.set_xscale("log", base=2)
            axes.set_xticks(STAGES, [str(s) for s in STAGES])
            if method == "ntk":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
            axes.set_title(f"dynamic_{method} (dotted: static x{FACTOR})", loc="left", fontsize=10)
            axes.set_xlabel("tokens per stage (trained length 256)")
            axes.grid(which="both")
        panels[0].set_ylabel("perplexity")
        panels[1].legend(fontsize=9)
    plots.save(figure, path)


if __name__ == "__main__":
    main()
