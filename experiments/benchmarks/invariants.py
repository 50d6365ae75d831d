"""The invariants matrix as a table: how far two ways of feeding the same text are apart, staged and stock.

    python -m experiments.benchmarks.invariants [--encodings] [-o FILE]      prints Markdown

Runs the rows of tests/feeding.py on the same 3-layer random Llama (trained on 64 tokens, 200 fed); with
--encodings on the methods of tests/encoded_models.py, with 2 layers as there.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
import transformers
from encoded_models import METHODS as ENCODINGS
from encoded_models import patched
from feeding import ROWS, differences
from staged_models import METHODS, staged, stock

from ctxext.files import write_json

COLUMNS = {
    **{f"{name}": (lambda name=name: staged(method=name)) for name in METHODS},
    **{f"stock {kind}": (lambda kind=kind: stock(kind)) for kind in ("dynamic", "longrope")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out")
    parser.add_argument("--encodings", action="store_true")
    args = parser.parse_args()
    columns = {name: (lambda name=name: patched(name)) for name in ENCODINGS} if args.encodings else COLUMNS
    tokens = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(1))
    print("| largest difference of logits (changed top tokens) | " + " | ".join(columns) + " |")
    print("|---|" + "--:|" * len(columns))
    found = []
    for row in ROWS:
        cells = []
        for name, make in columns.items():
            difference, changed = differences(row, make(), tokens)
            found.append({"row": row, "model": name, "difference": difference, "changed": changed})
            cells.append(
                f"{difference:.0e} ({changed})" if difference < 0.01 else f"**{difference:.1f} ({changed})**"
            )
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)
    if args.out:
        document = {"torch": torch.__version__, "transformers": transformers.__version__, "results": found}
        write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
