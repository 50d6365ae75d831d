"""What exact dynamic scaling costs: a staged schedule against static YaRN, on the same model in one run.

    python -m experiments.benchmarks.staged_attention [--pairs 7] [--dtype float32] [-o FILE]

    decode   one step with 4k and 16k tokens in the cache (the stage stays the same, as in all but one step in g)
    change   a step that enters a new stage, so that all cached keys are turned; and that spread over a stage
    prefill  a prompt that crosses 8 stages, without and with a cache
    memory   bytes of the cache after that prefill

Each figure is a ratio, staged / static, of CPU seconds; pairs run alternately, the median is shown with the
range. The model is a random Llama (hidden 256, 4 layers, heads 8/4 of 64, vocabulary 4,096): small, so attention
and whatever is around it weigh more than they do in a real one.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from dataclasses import replace

import torch

import ctxext
from experiments.benchmarks.random_llama import random_llama

TRAINED, FACTOR, STAGE = 2048, 8, 256


def model(dtype: torch.dtype):
    more = {"intermediate_size": 704, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}
    return random_llama(256, 4, 8, 4096, TRAINED, **more).to(dtype)


def filled(net, length: int):
    """A cache of `length` tokens, as a prefill leaves it."""
    ids = torch.randint(0, 4096, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return net.model(ids, use_cache=True).cache


def size(cache) -> int:
    """Bytes of a cache: keys, values and, under stages in 16 bits, keys as they were made."""
    made = [getattr(getattr(layer, "_ctxext_held", None), "made", None) for layer in cache.layers]
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)] + made
    return sum(x.nbytes for x in tensors if x is not None)


def seconds(work) -> float:
    start = time.process_time()
    with torch.no_grad():
        work()
    return time.process_time() - start


def paired(staged, static, pairs: int) -> dict[str, float]:
    """Median and range of the ratio of two pieces of work, run alternately; one pair first isn't counted."""
    ratios, own = [], []
    for i in range(pairs + 1):
        first, second = seconds(staged), seconds(static)
        if i:
            ratios.append(first / second)
            own.append(second)
    return {
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "static_seconds": statistics.median(own),
    }


def decode(net, cache, length: int, steps: int):
    """Work: `steps` decoding steps, the cache cropped back each time so that its length stays."""
    token = torch.tensor([[7]])
    position = torch.tensor([[length]])

    def work():
        for _ in range(steps):
            net(token, cache=cache, position_ids=position, use_cache=True)
            cache.crop(-1)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("-o", "--out")
    args = parser.parse_args()
    net = model(getattr(torch, args.dtype))
    staged, static = copy.deepcopy(net), net
    ctxext.patch(staged, "dynamic_yarn", FACTOR, granularity=STAGE)
    ctxext.patch(static, "yarn", FACTOR)
    found = {}
    for length in (4096, 16384 - 64):
        ours, theirs = filled(staged, length), filled(static, length)
        work = decode(staged, ours, length, 8), decode(static, theirs, length, 8)
        found[f"decode at {length}"] = paired(*work, args.pairs)

        step = decode(staged, ours, length, 1)

        def change(cache=ours, step=step):
            # Say that the keys are a stage behind: the next step has to turn all of them.
            for layer in cache.layers:
                held = layer._ctxext_held
                layer._ctxext_held = replace(held, stages=(held.stages[0] - 1,))
            step()

        row = paired(change, decode(static, theirs, length, 1), args.pairs)
        row["amortised"] = 1 + (row["ratio"] - 1) / STAGE
        found[f"step that changes stage at {length}"] = row
    ids = torch.randint(0, 4096, (1, TRAINED + 8 * STAGE), generator=torch.Generator().manual_seed(0))
    for cached in (False, True):
        ours, theirs = (lambda m=m, c=cached: m.model(ids, use_cache=c) for m in (staged, static))
        found[f"prefill of {ids.shape[1]} across 8 stages, {'with' if cached else 'no'} cache"] = paired(
            ours, theirs, args.pairs
        )
    caches = [filled(m, ids.shape[1]) for m in (staged, static)]
    found["cache memory"] = {"ratio": size(caches[0]) / size(caches[1])}
    settings = {
        "dtype": args.dtype,
        "pairs": args.pairs,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    for name, row in found.items():
        spread = f"   {row['low']:.3f} .. {row['high']:.3f}" if "low" in row else ""
        more = f"   over a stage of {STAGE}: {row['amortised']:.4f}" if "amortised" in row else ""
        print(f"{name:48} {row['ratio']:.3f}{spread}{more}")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"settings": settings, "results": found}, file, indent=1)


if __name__ == "__main__":
    main()
