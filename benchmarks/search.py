"""What does a search for LongRoPE's factors cost? Evolution with the paper's constants, `curve`, and random search.

    python benchmarks/search.py -o FOLDER [--factors 4,8] [--strategies evolution,curve,random]
    python benchmarks/search.py -o FOLDER --smollm2 [--minutes 20]

Each search runs on the same documents from the same seeds (PI, NTK, YaRN). Reported: the perplexity of the search's
documents and of held-out ones against model tokens spent, and the tokens at which each search passes what evolution
ends with. Every search has a log in FOLDER; run again, the script goes on where it was stopped. On the embedded
model all of it takes about half an hour on one core; evolution is nearly all of that.
"""

import argparse
import json
import math
import random
from pathlib import Path

import torch

from ctxext import methods
from ctxext.checkpoint import load, read_config
from ctxext.hf_config import read_schedule
from ctxext.resolve import resolve
from ctxext.search import documents, strategies
from ctxext.search.evaluator import BudgetSpent, Evaluator, Problem
from ctxext.search.fitness import Fitness
from ctxext.search.log import Log
from ctxext.search.space import Space, as_params, seeds
from ctxext_evals.models import TINY_TEXTS

SEARCH_DOCUMENTS, HELD_OUT = 3, 6
CURVE_SEEDS = 3
RANDOM = 333
COLOURS = {"evolution": "#d55e00", "curve": "#0072b2", "random": "#999999"}


class Bench:
    """One model at one factor: its documents, and searches on them."""

    def __init__(
        self, model: str, texts: list[str], factor: float, folder: Path, dtype: str, counts: tuple[int, int]
    ):
        from transformers import AutoTokenizer

        source = resolve(model)
        self.rope = read_schedule(read_config(source)).rope
        self.factor, self.folder = factor, folder
        length = round(self.rope.trained_length * factor)
        found = documents.cut(texts, AutoTokenizer.from_pretrained(source), length, sum(counts))
        self.mine = documents.plain(found[: counts[0]])
        self.others = documents.plain(found[counts[0] :])
        self.fitness = Fitness(load(source, dtype=dtype))
        self.space = Space(self.rope.size, factor)
        self.seeds = seeds(self.rope, factor, self.space)

    def evaluator(self, name: str, texts: list[documents.Document], **more) -> Evaluator:
        path = self.folder / f"{name}.jsonl"
        settings = {
            "documents": documents.digest(texts),
            "factor": self.factor,
            "rope": list(self.rope.inv_freq()),
        }
        return Evaluator(
            self.space,
            lambda candidate, which: self.fitness(self.schedule(candidate), [texts[d] for d in which]),
            [len(d.ids) for d in texts],
            log=Log.begin(path, settings, resume=path.exists()),
            **more,
        )

    def schedule(self, candidate):
        return methods.schedule(self.rope, "longrope", self.factor, **as_params(candidate))

    def run(self, name: str, strategy: str, seed: int, constants: dict, budget: float = math.inf) -> dict:
        """One search, then the held-out perplexity of what was best as it went along."""
        evaluator = self.evaluator(name, self.mine, budget=budget)
        problem = Problem(self.space, self.seeds, evaluator, random.Random(f"{seed}/long"), seed)
        bests = []

        def note(record: dict) -> None:
            if evaluator.best and (not bests or bests[-1][1] != evaluator.best):
                bests.append((record["tokens"], evaluator.best, evaluator.best_loss))

        evaluator.on_value = note
        try:
            strategies.get(strategy)(problem, **constants)
        except BudgetSpent:
            pass
        check = self.evaluator(f"{name}-held-out", self.others) if self.others else None
        trace, last = [], math.inf
        for tokens, candidate, loss in bests:
            final = candidate == evaluator.best
            # Every improvement of a hundredth of a percent would cost more to check than to find.
            if loss < last - 2e-3 or final:
                held = math.exp(check.means([candidate])[0]) if check else None
                trace.append({"tokens": tokens, "search": math.exp(loss), "held_out": held})
                last = loss
        return {
            "strategy": strategy,
            "seed": seed,
            "tokens": evaluator.tokens,
            "full_evaluations": evaluator.tokens / evaluator.full_cost(),
            "candidates": len(evaluator.values),
            "factors": list(evaluator.best.factors),
            "start_tokens": evaluator.best.start_tokens,
            "trace": trace,
        }


def reached(run: dict, key: str, goal: float) -> int | None:
    """Tokens after which a search was at `goal` or below."""
    return next((point["tokens"] for point in run["trace"] if point[key] is not None and point[key] <= goal), None)


def compare(runs: list[dict]) -> list[dict]:
    """Each search's end, and its tokens to reach evolution's end, as a share of what evolution took to get there."""
    evolution = next((r for r in runs if r["strategy"] == "evolution"), None)
    rows = []
    for run in runs:
        end = run["trace"][-1]
        row = {k: run[k] for k in ("strategy", "seed", "tokens", "full_evaluations", "start_tokens")}
        row |= {"search": end["search"], "held_out": end["held_out"]}
        if evolution:
            for key in ("search", "held_out"):
                goal = evolution["trace"][-1][key]
                took = None if goal is None else reached(run, key, goal)
                row[f"to_reach_{key}"] = took
                row[f"share_{key}"] = None if took is None else took / evolution["tokens"]
        rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    lines = [
        "| search | seed | full evaluations | perplexity | held out | tokens to evolution's end | held out |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        shares = []
        for key in ("search", "held_out"):
            took, share = row.get(f"to_reach_{key}"), row.get(f"share_{key}")
            shares.append("never" if took is None else f"{took:,} ({share:.1%})")
        held = "" if row["held_out"] is None else f"{row['held_out']:.3f}"
        lines.append(
            f"| {row['strategy']} | {row['seed']} | {row['full_evaluations']:.0f} | {row['search']:.3f} | {held} "
            f"| {' | '.join(shares)} |"
        )
    return "\n".join(lines)


def draw(found: dict, path: Path) -> None:
    """Perplexity against tokens: one panel per model and factor, search documents solid, held-out ones dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(found), figsize=(5.4 * len(found), 3.8), layout="constrained", squeeze=False
    )
    for axes, (label, entry) in zip(panels[0], found.items(), strict=True):
        for run in entry["runs"]:
            tokens = [p["tokens"] for p in run["trace"]] + [run["tokens"]]
            for key, style in (("search", "-"), ("held_out", ":")):
                values = [p[key] for p in run["trace"]]
                if None not in values:
                    named = (
                        f"{run['strategy']}{', held out' if key == 'held_out' else ''}"
                        if not run["seed"]
                        else None
                    )
                    colour = COLOURS[run["strategy"]]
                    axes.step(
                        tokens, [*values, values[-1]], style, where="post", color=colour, label=named, lw=1.4
                    )
        axes.set(xscale="log", xlabel="model tokens", title=label)
        axes.set_ylabel("perplexity")
        axes.grid(alpha=0.25, which="both")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)


def tiny(args: argparse.Namespace) -> dict:
    found = {}
    texts = [path.read_text() for path in TINY_TEXTS]
    for factor in map(int, args.factors.split(",")):
        folder = args.out / f"tiny-{factor}x"
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench("tiny", texts, factor, folder, "float32", (SEARCH_DOCUMENTS, HELD_OUT))
        runs = []
        for strategy in args.strategies.split(","):
            constants = {"random": {"candidates": RANDOM}}.get(strategy, {})
            for seed in range(CURVE_SEEDS if strategy == "curve" else 1):
                runs.append(bench.run(f"{strategy}-{seed}", strategy, seed, constants))
        found[f"tiny {factor}x"] = {"runs": runs, "rows": compare(runs)}
        print(f"\ntiny {factor}x\n\n{markdown(found[f'tiny {factor}x']['rows'])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--factors", default="4,8")
    parser.add_argument("--strategies", default="evolution,curve,random")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = tiny(args)
    (args.out / "search.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, args.out / "search.png")


if __name__ == "__main__":
    main()
