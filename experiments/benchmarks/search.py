r"""What does a search for LongRoPE's factors cost? The paper's evolution, `curve` and random search, side by side.

    python -m experiments.benchmarks.search -o FOLDER [--factors 4,8] \
        [--strategies evolution,curve,random] [--folds 3]
    python -m experiments.benchmarks.search -o FOLDER --smollm2 --evaluations 24

All searches run on the same documents from the same seeds (PI, NTK, YaRN). Reported: the perplexity of the
search's documents and of held-out ones against model tokens spent, and the tokens at which each search passes what
evolution ends with. Every fold searches on three others of nine texts, holds out the rest, and has a source of
chance of its own. Each search has a log in FOLDER; run again, the script goes on where it was stopped; --minutes
stops each search after so many, 0 reports what the logs have. On the embedded model all takes about an hour of one
core, two thirds of it evolution's. SmolLM2 (experiments/smollm2/material.py names the packages that it needs)
reads one document of 16,384 tokens, two minutes a time, and has one held out.
"""

import argparse
import contextlib
import json
import math
import random
import time
from pathlib import Path

import torch

from ctxext import methods, plots
from ctxext.config.read import read_schedule
from ctxext.evals.models import TINY_TEXTS
from ctxext.files import read_config, write_json
from ctxext.folders.load import load
from ctxext.folders.source import resolve
from ctxext.methods.settings import parse_settings
from ctxext.search import documents, strategies
from ctxext.search.evaluator import BudgetSpent, Evaluator, Problem
from ctxext.search.fitness import Fitness
from ctxext.search.log import Log
from ctxext.search.space import Space, as_params, seeds
from experiments.tables import table

COUNTS = (3, 6)  # documents to search on, and held out
RANDOM = 265  # with the three seeds as many evaluations as `curve` has
COLOURS = {"evolution": "#d55e00", "curve": "#0072b2", "random": "#999999"}
NOTICED = 2e-3  # nats: a smaller improvement costs more to check on held-out documents than it tells


class Bench:
    """One model at one factor: its documents, and searches on them. Fold n begins with the n-th few of them."""

    def __init__(
        self,
        model,
        texts,
        factor: float,
        folder: Path,
        dtype: str,
        counts: tuple[int, int] = COUNTS,
        fold: int = 0,
    ):
        from transformers import AutoTokenizer

        source = resolve(model)
        folder.mkdir(parents=True, exist_ok=True)
        self.rope, self.factor, self.folder = read_schedule(read_config(source)).rope, factor, folder
        length = round(self.rope.trained_length * factor)
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        cut = documents.cut(texts, self.tokenizer, length, sum(counts))
        turn = counts[0] * fold
        self.cut, self.fold = [*cut[turn:], *cut[:turn]], fold
        self.mine, self.others = documents.plain(self.cut[: counts[0]]), documents.plain(self.cut[counts[0] :])
        self.fitness = Fitness(load(source, dtype=dtype))
        self.space = Space(self.rope.size, factor)
        self.seeds = seeds(self.rope, factor, self.space)
        self.deadline = math.inf

    def evaluator(self, name: str, texts: list[documents.Document], **more) -> Evaluator:
        path = self.folder / f"{name}.jsonl"
        settings = {
            "documents": documents.digest(texts),
            "factor": self.factor,
            "rope": list(self.rope.inv_freq()),
        }
        return Evaluator(
            self.space,
            lambda candidate, which: self.losses(self.schedule(candidate), [texts[d] for d in which]),
            [len(d.ids) for d in texts],
            log=Log.begin(path, settings, resume=path.exists()),
            **more,
        )

    def losses(self, schedule, texts) -> list[float]:
        if time.monotonic() > self.deadline:
            raise BudgetSpent
        return self.fitness(schedule, texts)

    def schedule(self, candidate):
        return methods.schedule(self.rope, "longrope", self.factor, **as_params(candidate))

    def run(self, strategy: str, constants: dict, evaluations: float, minutes: float) -> dict | None:
        """One search, then the held-out perplexity of what was best as it went along. None if it didn't begin."""
        name, seed = f"{strategy}-{self.fold}", self.fold
        evaluator = self.evaluator(name, self.mine, budget=evaluations * sum(len(d.ids) for d in self.mine))
        problem = Problem(self.space, self.seeds, evaluator, random.Random(f"{seed}/long"), seed)
        bests = []

        def note(record: dict) -> None:
            if evaluator.history and (not bests or bests[-1][1] != evaluator.best):
                bests.append((record["tokens"], evaluator.best, evaluator.best_loss))

        evaluator.on_value = note
        self.deadline = time.monotonic() + 60 * minutes
        with contextlib.suppress(BudgetSpent):
            strategies.get(strategy)(problem, **strategies.constants(strategy, constants))
        self.deadline = math.inf
        if not bests:
            return None
        check = self.evaluator(f"{name}-held-out", self.others) if self.others else None
        trace, last = [], math.inf
        for tokens, candidate, loss in bests:
            point = {"tokens": tokens, "search": math.exp(loss), "held_out": None}
            if check and (loss < last - NOTICED or candidate == evaluator.best):
                point["held_out"], last = math.exp(check.means([candidate])[0]), loss
            trace.append(point)
        return {
            "strategy": strategy,
            "fold": self.fold,
            "tokens": evaluator.tokens,
            "full_evaluations": evaluator.tokens / evaluator.full_cost(),
            "candidates": len(evaluator.values),
            "factors": list(evaluator.best.factors),
            "start_tokens": evaluator.best.start_tokens,
            "seeds": {
                n: math.exp(m) for n, m in zip(self.seeds, evaluator.means([*self.seeds.values()]), strict=True)
            },
            "trace": trace,
        }


def reached(run: dict, key: str, goal: float) -> int | None:
    """Tokens after which a search was at `goal` or below."""
    return next((point["tokens"] for point in run["trace"] if point[key] is not None and point[key] <= goal), None)


def compare(runs: list[dict]) -> list[dict]:
    """Each search's end, and its tokens to reach evolution's end as a share of all that evolution spent."""
    rows = []
    for run in runs:
        same = (r for r in runs if r["strategy"] == "evolution" and r["fold"] == run["fold"])
        evolution, end = next(same, None), run["trace"][-1]
        row = {k: run[k] for k in ("strategy", "fold", "tokens", "full_evaluations", "start_tokens")}
        row |= {"search": end["search"], "held_out": end["held_out"]}
        for key in ("search", "held_out"):
            if evolution is None:
                continue
            goal = evolution["trace"][-1][key]
            took = None if goal is None else reached(run, key, goal)
            row |= {f"to_reach_{key}": took, f"share_{key}": took and took / evolution["tokens"]}
        rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    head = [
        "search",
        "fold",
        "full evaluations",
        "perplexity",
        "held out",
        "tokens to evolution's end",
        "held out",
    ]
    cells = []
    for row in rows:
        shares = []
        for key in ("search", "held_out"):
            took, share = row.get(f"to_reach_{key}"), row.get(f"share_{key}")
            shares.append("never" if took is None else f"{took:,} ({share:.1%})")
        held = "" if row["held_out"] is None else f"{row['held_out']:.3f}"
        figures = [f"{row['full_evaluations']:.0f}", f"{row['search']:.3f}"]
        cells.append([row["strategy"], str(row["fold"]), *figures, held, *shares])
    return table(head, cells)


def draw(found: dict, path: Path) -> None:
    """Perplexity above evolution's end against tokens: documents of the search above, held-out ones below."""
    with plots.figure(5.2 * len(found), 6) as figure:
        panels = figure.subplots(2, len(found), squeeze=False, sharex="col")
        for column, (label, entry) in enumerate(found.items()):
            for axes, key in zip(panels[:, column], ("search", "held_out"), strict=True):
                lows, highs = [0.0], [1.0]
                for run in entry["runs"]:
                    mate = next(
                        (r for r in entry["runs"] if (r["strategy"], r["fold"]) == ("evolution", run["fold"])), run
                    )
                    end = mate["trace"][-1][key]
                    points = [(p["tokens"], 100 * (p[key] / end - 1)) for p in run["trace"] if p[key] is not None]
                    if not points:
                        continue
                    tokens, values = zip(*points, strict=True)
                    line = {"color": COLOURS[run["strategy"]], "label": None if run["fold"] else run["strategy"]}
                    axes.step(
                        [*tokens, run["tokens"]], [*values, values[-1]], where="post", lw=1.4, alpha=0.8, **line
                    )
                    # PI and NTK would flatten all the rest: up to the best seed of each fold.
                    lows, highs = [*lows, min(values)], [*highs, 100 * (_best_seed(run, key) / end - 1)]
                axes.axhline(0, color="0.3", lw=0.8, ls="--")
                axes.set(xscale="log", ylabel="% above evolution's end", ylim=(1.3 * min(lows), 1.05 * max(highs)))
                axes.set_title(f"{label}, {'documents of the search' if key == 'search' else 'held out'}")
                axes.grid(which="both")
            panels[1, column].set_xlabel("model tokens")
        panels[0][0].legend(fontsize=8)
    plots.save(figure, path)


def _best_seed(run: dict, key: str) -> float:
    """The value of the best seed, if it was measured by this key; else of the first point."""
    seen = [p[key] for p in run["trace"][: len(run["seeds"])] if p[key] is not None]
    return min(seen)


def searches(bench: Bench, args: argparse.Namespace, constants: dict) -> list[dict]:
    constants = {"curve": parse_settings(args.set), **constants}
    names = args.strategies.split(",")
    found = [bench.run(n, constants.get(n, {}), args.evaluations, args.minutes) for n in names]
    return [run for run in found if run]


def tiny(args: argparse.Namespace) -> dict:
    found = {}
    texts = [path.read_text(encoding="utf-8") for path in TINY_TEXTS]
    for factor in map(int, args.factors.split(",")):
        runs = []
        for fold in range(args.folds):
            bench = Bench("tiny", texts, factor, args.out / f"tiny-{factor}x", "float32", fold=fold)
            runs += searches(bench, args, {"random": {"candidates": RANDOM}})
        found[f"tiny {factor}x"] = {"runs": runs, "rows": compare(runs)}
    return found


def smollm2(args: argparse.Namespace) -> dict:
    """One document to search on and one held out: a reading of 16,384 tokens takes two minutes on one core."""
    from experiments.smollm2.material import gguf, kjv

    model, text = gguf(), kjv(args.out).read_text(encoding="utf-8")
    bench = Bench(model, [text], 2, args.out / "smollm2-2x", "bfloat16", (1, 1))
    runs = searches(bench, args, {})
    return {"SmolLM2-135M 2x": {"runs": runs, "rows": compare(runs)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--factors", default="4,8")
    parser.add_argument("--strategies", default="evolution,curve,random")
    parser.add_argument("--folds", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="a constant of curve")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--evaluations", type=float, default=math.inf, help="of each search, at most")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of each search")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = smollm2(args) if args.smollm2 else tiny(args)
    for label, entry in found.items():
        print(f"\n{label}\n\n{markdown(entry['rows'])}")
    name = "search-smollm2" if args.smollm2 else "search"
    path = args.out / f"{name}.json"
    found = (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}) | found
    write_json(path, found, indent=1)
    draw(found, args.out / f"{name}.png")


if __name__ == "__main__":
    main()
