"""Peak memory and CPU time of scoring one long text: ctxext against lm-eval's HFLM and `model(ids, labels=ids)`.

    python -m experiments.benchmarks.perplexity [--tokens 8192,16384] [--vocabulary 49152] [--repeat 1]

Same random Llama (hidden 64, 2 layers: what is compared is the logits), same tokens, one run, each way in a
process of its own. Memory is the peak resident set above what was resident before the pass, after a warm-up on 64
tokens. lm-eval scores one window of `loglikelihood_rolling`, the whole text, in float32. Exit code 1 if memory is
above 1/30 or CPU time above 0.6 of either other way, or the NLLs differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from experiments.benchmarks import peak_memory
from experiments.benchmarks.random_llama import random_llama

WAYS = ("prefix_curve", "stock loss", "lm-eval")
MEMORY, CPU, NLL = 30, 0.6, 1e-5


def tokenizer_of(vocabulary: int):
    """A word-level tokenizer whose text "t5 t7" is the tokens 5 and 7, for lm-eval, which insists on one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="t1", eos_token="t2", pad_token="t0")


def measure(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """One pass: {"mib": peak above baseline, "cpu": seconds, "nll": nats per token}."""
    import torch

    from ctxext.evals.perplexity import prefix_curve

    model = random_llama(64, 2, 4, vocabulary, tokens)
    ids = [1, *torch.randint(3, vocabulary, (tokens - 1,)).tolist()]

    harness: Any = None
    if way == "lm-eval":
        import logging

        from lm_eval.models.huggingface import HFLM

        logging.disable(logging.WARNING)
        options: dict[str, Any] = {"max_length": tokens, "batch_size": 1, "add_bos_token": False}
        options |= {"softmax_dtype": "float32", "pretrained": model, "tokenizer": tokenizer_of(vocabulary)}
        harness = HFLM(**options)

    def score(sequence: list[int]) -> float:
        if way == "prefix_curve":
            return prefix_curve(model, [sequence], [len(sequence)]).rows[0]["nll"]
        if way == "stock loss":
            batch = torch.tensor([sequence])
            with torch.no_grad():
                return float(model(batch, labels=batch, use_cache=False).loss)
        # A window of rolling log-likelihood: the prefix token, then everything else.
        ((logprob, _),) = harness._loglikelihood_tokens([(None, sequence[:1], sequence[1:])], disable_tqdm=True)
        return -logprob / (len(sequence) - 1)

    score(ids[:64])
    baseline, cpu = peak_memory.start(), time.process_time()
    nll = score(ids)
    grown = peak_memory.peak_above(baseline)
    return {"mib": grown, "cpu": time.process_time() - cpu, "nll": nll}


def compare(tokens: int, vocabulary: int, repeat: int) -> bool:
    """Print medians and ratios at one length; True if every target is met."""
    medians = {}
    for way in WAYS:
        command = [
            sys.executable,
            "-m",
            "experiments.benchmarks.perplexity",
            "--way",
            way,
            "--tokens",
            str(tokens),
            "--vocabulary",
            str(vocabulary),
        ]
        environment = {**os.environ, "TQDM_DISABLE": "1"}
        runs = []
        for _ in range(repeat):
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8", env=environment)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        medians[way] = row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(f"  {way:13} {row['mib']:7.0f} MiB above baseline  {row['cpu']:6.2f} CPU s  nll {row['nll']:.6f}")
    own, met = medians[WAYS[0]], True
    for way in WAYS[1:]:
        other = medians[way]
        memory, cpu = other["mib"] / own["mib"], own["cpu"] / other["cpu"]
        gap = abs(own["nll"] - other["nll"])
        met &= memory >= MEMORY and cpu <= CPU and gap <= NLL
        print(f"  against {way}: 1/{memory:.1f} of the memory, {cpu:.2f}x the CPU time, nll differs by {gap:.1e}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,16384")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; medians are reported")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lengths = [int(n) for n in options.tokens.split(",")]
    if options.way:
        print(json.dumps(measure(options.way, lengths[0], options.vocabulary)))
        return 0
    met = True
    for tokens in lengths:
        print(f"{tokens} tokens, vocabulary {options.vocabulary}:")
        met &= compare(tokens, options.vocabulary, options.repeat)
    print("all targets met" if met else f"missed: memory 1/{MEMORY}, CPU {CPU}x, nll {NLL:g}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
