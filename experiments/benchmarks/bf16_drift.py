"""What changes of stage do to a bfloat16 model: error after 1, 4, 16 and 64 of them.

    python -m experiments.benchmarks.bf16_drift [-o FILE]

Two views. *Keys*: random bfloat16 keys, turned from stage to stage, against one turn in float64: why a cache in
16 bits keeps keys as they were made and turns those. A turn rounds each coordinate once, by at most 2^-8 of it,
so with independent roundings n turns add up to less than sqrt(n) * 2^-8 / sqrt(3) in the root mean square, and
never to more than n * 2^-8; 64 turns give more than the former, so they aren't independent. *Logits*: the
embedded model in bfloat16, decoding token by token across n changes, against float32; beside it the same model
reading the text in one forward, and static NTK, which never turns a key.
"""

import argparse
import itertools
import math
from typing import Any

import torch

import ctxext
from ctxext import methods
from ctxext.evals.models import TINY_TEXTS, load
from ctxext.files import write_json
from ctxext.live.stages import turn_keys
from ctxext.rope import Rope

CHANGES = (1, 4, 16, 64)
TRAINED, END = 256, 768


def keys_after(changes: int) -> dict[str, float]:
    """Relative RMS error of keys that went through `changes` turns, and the bound for it."""
    rope = Rope(1e5, 64, 8192)
    stages = methods.schedule(rope, "dynamic_ntk", 4, granularity=8192 * 3 // changes).stages
    assert len(stages) == changes + 1
    table = torch.tensor([s.inv_freq for s in stages], dtype=torch.float64)
    positions = torch.arange(8192, dtype=torch.float64)[None, :, None]
    keys = torch.randn(1, 4, 8192, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = keys
    for before, after in itertools.pairwise(table):
        angle = positions * (after - before)
        turned = turn_keys(turned, angle.cos().float(), angle.sin().float(), "halves")
    angle = positions * (table[-1] - table[0])
    exact = turn_keys(keys.double(), angle.cos(), angle.sin(), "halves")
    error = (turned.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    return {"keys": error.item(), "bound": math.sqrt(changes) * 2**-8 / math.sqrt(3)}


def logits_after(changes: int) -> dict[str, float]:
    """Mean KL divergence, nats per token, of the last 64 positions against the float32 model."""
    ids = None
    found = {}
    for dtype in ("float32", "bfloat16"):
        subject = load("tiny", dtype=dtype)
        if ids is None:
            ids = torch.tensor([subject.tokenizer(TINY_TEXTS[0].read_text(encoding="utf-8")).input_ids[:END]])
        for method in ("dynamic_ntk", "ntk"):
            options: dict[str, Any] = (
                {"granularity": (END - TRAINED) // changes} if method == "dynamic_ntk" else {}
            )
            ctxext.patch(subject.model, method, END / TRAINED, **options)
            with torch.no_grad():
                whole = subject.model(ids, use_cache=False).logits[:, -64:]
                out = subject.model(ids[:, :TRAINED], use_cache=True)
                steps = []
                for i in range(TRAINED, END):
                    out = subject.model(ids[:, i : i + 1], cache=out.cache, use_cache=True)
                    steps.append(out.logits)
            found[dtype, method, "whole"] = whole.float().log_softmax(-1)
            found[dtype, method, "decoded"] = torch.cat(steps, 1)[:, -64:].float().log_softmax(-1)

    def divergence(method: str, how: str) -> float:
        exact = found["float32", method, "whole"]
        return (exact.exp() * (exact - found["bfloat16", method, how])).sum(-1).mean().item()

    return {
        "staged, decoded": divergence("dynamic_ntk", "decoded"),
        "staged, one forward": divergence("dynamic_ntk", "whole"),
        "static, decoded": divergence("ntk", "decoded"),
        "static, one forward": divergence("ntk", "whole"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out")
    args = parser.parse_args()
    rows = [{"changes": n, **keys_after(n), **logits_after(n)} for n in CHANGES]
    print("| stage changes | " + " | ".join(k for k in rows[0] if k != "changes") + " |")
    print("|--:|" + "--:|" * (len(rows[0]) - 1))
    for row in rows:
        cells = [f"{v:.2e}" for k, v in row.items() if k != "changes"]
        print(f"| {row['changes']} | " + " | ".join(cells) + " |")
    if args.out:
        write_json(args.out, {"torch": torch.__version__, "results": rows}, indent=1)


if __name__ == "__main__":
    main()
