"""CPU time of an 11-depth row of passkey prompts with a shared prefix, against a prefill for each prompt.

    python -m experiments.benchmarks.passkey [--tokens 1024] [--trials 3] [--model MODEL] [--repeat 3]

Same prompts, same model, alternating in one process; medians of the ratios. Without --model a random Llama with
the width of a 135M model and a quarter of its layers. The more keys per depth, the more is shared: one key per
depth saves least. Exit code 1 if the row costs more than 0.6 of its prefills or a score differs. How many
tokens were run is printed too: that doesn't depend on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from experiments.benchmarks.random_llama import random_llama

DEPTHS = [i / 10 for i in range(11)]
TARGET = 0.6


class Bytes:
    """One token per byte: any prompt, no files."""

    def __call__(self, text: str, **options):
        return type("Answer", (), {"input_ids": list(text.encode())})()


def subject(name: str | None):
    """(model, tokenizer, BOS id)."""
    if name is not None:
        from ctxext.evals.models import load
        from ctxext.text import bos_id

        loaded = load(name, dtype="float32")
        return loaded.model, loaded.tokenizer, bos_id(loaded.tokenizer)
    more = {"intermediate_size": 1536, "num_key_value_heads": 3}
    return random_llama(576, 8, 9, 49152, 8192, **more), Bytes(), None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--trials", type=int, default=3, help="keys per depth")
    parser.add_argument("--model", help="a model to measure instead of the random one")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()

    from ctxext.evals.passkey import passkey
    from ctxext.evals.prefix import PrefixScorer
    from ctxext.needles.prompts import PromptBuilder, make_key

    model, tokenizer, bos = subject(options.model)

    def row(reuse: bool):
        start = time.process_time()
        grid = {"depths": DEPTHS, "trials": options.trials, "bos": bos, "reuse": reuse}
        found = passkey(model, tokenizer, [options.tokens], **grid)
        return time.process_time() - start, found.rows

    row(True)  # warm-up
    ratios, apart, same = [], 0.0, True
    for _ in range(options.repeat):
        whole, one = row(False)
        shared, other = row(True)
        ratios.append(shared / whole)
        apart = max(apart, *(abs(a["logprob"] - b["logprob"]) for a, b in zip(one, other, strict=True)))
        same = same and all(a["correct"] == b["correct"] for a, b in zip(one, other, strict=True))
        print(f"  a prefill each {whole:7.2f} CPU s   shared {shared:7.2f} CPU s   ratio {shared / whole:.3f}")
    scorer, builder = PrefixScorer(model), PromptBuilder(tokenizer, bos)
    for depth in reversed(DEPTHS):
        for trial in range(options.trials):
            prompt = builder.build(options.tokens, depth, make_key(0, options.tokens, depth, trial))
            scorer.scores(prompt.ids, range(prompt.answer_start, len(prompt.ids)))
    run = scorer.tokens_run / (len(DEPTHS) * options.trials * options.tokens)
    ratio = statistics.median(ratios)
    print(f"{options.tokens} tokens, {len(DEPTHS)} depths x {options.trials}: {run:.3f} of the tokens, ", end="")
    print(f"{ratio:.3f} of the CPU time, log-probabilities differ by {apart:.1e}")
    return 0 if ratio <= TARGET and same and apart < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
