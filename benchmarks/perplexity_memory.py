"""Peak memory and CPU time of scoring one long sequence: `prefix_curve` against `model(ids, labels=ids)`.

    python benchmarks/perplexity_memory.py [--tokens 16384] [--vocabulary 49152] [--repeat 1]

Each runs in a process of its own on a small random Llama (hidden 64, 2 layers), so that what is compared is the
logits. Memory is the peak resident set above what was resident before the pass, after a warm-up on 64 tokens.
Exit code 1 if the memory ratio is below --target (20).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("prefix_curve", "stock loss")


def resident_mib() -> float:
    """What is resident now, not the peak so far, which loading may have set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """One pass: {"mib": peak above baseline, "cpu": seconds, "nll": nats per token}."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ctxext_evals.perplexity import prefix_curve

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, vocabulary, (tokens,)).tolist()

    def score(sequence: list[int]) -> float:
        if way == WAYS[0]:
            return prefix_curve(model, [sequence], [len(sequence)]).rows[0]["nll"]
        batch = torch.tensor([sequence])
        with torch.no_grad():
            return float(model(batch, labels=batch, use_cache=False).loss)

    score(ids[:64])
    baseline, cpu = resident_mib(), time.process_time()
    nll = score(ids)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"mib": peak - baseline, "cpu": time.process_time() - cpu, "nll": nll}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; medians are reported")
    parser.add_argument("--target", type=float, default=20, help="smallest memory ratio that passes")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens, options.vocabulary)))
        return 0

    medians = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way]
        command += ["--tokens", str(options.tokens), "--vocabulary", str(options.vocabulary)]
        runs = [
            json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            )
            for _ in range(options.repeat)
        ]
        medians[way] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row = medians[way]
        print(f"{way:14} {row['mib']:8.0f} MiB above baseline  {row['cpu']:6.2f} CPU s  nll {row['nll']:.6f}")
    own, stock = (medians[way] for way in WAYS)
    ratio = stock["mib"] / own["mib"]
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}: {ratio:.1f}x less memory, ", end="")
    print(f"{stock['cpu'] / own['cpu']:.2f}x less CPU time, nll differs by {abs(own['nll'] - stock['nll']):.1e}")
    return 0 if ratio >= options.target else 1


if __name__ == "__main__":
    sys.exit(main())
