"""What a search for factors holds in memory: the fitness of one candidate and of many, against the stock loss.

    python -m experiments.benchmarks.search_memory [--tokens 8192] [--vocabulary 49152] [--candidates 1,10,30]

Each row is a process of its own on the same random Llama: peak resident memory above the loaded model's. Every
candidate is another longrope schedule, patched into the model as a search does.
"""

import argparse
import json
import subprocess
import sys

from experiments.benchmarks import peak_memory
from experiments.benchmarks.random_llama import random_llama


def measure(way: str, candidates: int, tokens: int, vocabulary: int) -> float:
    """MiB above the loaded model after reading one document under so many candidates."""
    import torch

    from ctxext import methods
    from ctxext.rope import Rope
    from ctxext.search.documents import Document
    from ctxext.search.fitness import Fitness

    model = random_llama(64, 2, 4, vocabulary, tokens // 4)
    ids = torch.randint(3, vocabulary, (1, tokens))
    rope = Rope(theta=1e4, dim=16, trained_length=tokens // 4)
    fitness = Fitness(model) if way == "search" else None
    baseline = peak_memory.start()
    for number in range(candidates):
        if fitness is None:
            with torch.no_grad():
                model(input_ids=ids, labels=ids)
        else:
            factors = [1 + 3 * i / 7 + 0.01 * number for i in range(8)]
            schedule = methods.schedule(rope, "longrope", 4, long_factor=factors, start_tokens=number % 3)
            fitness(schedule, [Document(tuple(ids[0].tolist()))])
    return peak_memory.peak_above(baseline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--candidates", default="1,10,30")
    parser.add_argument("--way", choices=["search", "stock loss"], help="measure this one here; prints JSON")
    args = parser.parse_args()
    if args.way:
        print(json.dumps({"mib": measure(args.way, int(args.candidates), args.tokens, args.vocabulary)}))
        return
    print("| | candidates | MiB above the model |\n|---|--:|--:|")
    for way, counts in (("stock loss", "1"), ("search", args.candidates)):
        for count in counts.split(","):
            command = [
                sys.executable,
                "-m",
                "experiments.benchmarks.search_memory",
                "--way",
                way,
                "--candidates",
                count,
            ]
            command += ["--tokens", str(args.tokens), "--vocabulary", str(args.vocabulary)]
            ran = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
            print(f"| {way} | {count} | {json.loads(ran.stdout.splitlines()[-1])['mib']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
