"""Peak memory and CPU time of training steps on long sequences: the chunked loss against the stock one.

    python -m experiments.benchmarks.training_memory [--tokens 8192] [--vocabulary 49152] [--chunk 256]

Each runs in a process of its own: the Trainer, LoRA, a small random Llama (hidden 256, 2 layers, tied head), so
that what is compared is the logits. Memory is the peak resident set above what was resident before the first step,
time is CPU seconds of two steps. Exit code 1 if the memory ratio is below 4 or the time ratio above 1.5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from experiments.benchmarks import peak_memory
from experiments.benchmarks.random_llama import random_llama

WAYS = ("chunked", "stock")
STEPS = 2


def measure(way: str, tokens: int, vocabulary: int, chunk: int) -> dict[str, float]:
    """Two steps: {"mib": peak above baseline, "cpu": seconds, "wall": seconds, "loss": of the last step}."""
    import torch
    from transformers import Trainer, TrainingArguments

    from ctxext.training import loss
    from ctxext.training.model import add_lora
    from ctxext.training.recipe import AdapterSpec
    from ctxext.training.sequences import collate

    model = add_lora(random_llama(256, 2, 4, vocabulary, tokens), AdapterSpec()).train()
    if way == "chunked":
        loss.bind(model, chunk)
    rows = [torch.randint(3, vocabulary, (tokens,)).tolist() for _ in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        items: Any = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model, args=args, train_dataset=items, data_collator=collate)
        baseline, cpu, wall = peak_memory.start(), time.process_time(), time.perf_counter()
        trainer.train()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    grown = peak_memory.peak_above(baseline)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"mib": grown, "cpu": cpu, "wall": wall, "loss": losses[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--chunk", type=int, default=256, help="tokens whose logits exist at a time")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; medians are reported")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens, options.vocabulary, options.chunk)))
        return 0

    medians = {}
    for way in WAYS:
        command = [
            sys.executable,
            "-m",
            "experiments.benchmarks.training_memory",
            "--way",
            way,
            "--chunk",
            str(options.chunk),
        ]
        command += ["--tokens", str(options.tokens), "--vocabulary", str(options.vocabulary)]
        runs = [
            json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout.splitlines()[
                    -1
                ]
            )
            for _ in range(options.repeat)
        ]
        medians[way] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row = medians[way]
        print(
            f"{way:8} {row['mib']:8.0f} MiB above baseline  {row['cpu']:6.2f} CPU s  {row['wall']:6.2f} s  "
            f"loss {row['loss']:.6f}"
        )
    own, stock = (medians[way] for way in WAYS)
    memory, slower = stock["mib"] / own["mib"], own["cpu"] / stock["cpu"]
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}: {memory:.1f}x less memory, "
        f"{slower:.2f}x the CPU time, losses differ by {abs(own['loss'] - stock['loss']):.1e}"
    )
    return 0 if memory >= 4 and slower <= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
