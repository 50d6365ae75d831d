"""What are searched factors worth? Beside PI, NTK, YaRN and cropping, on text and passkeys that no search saw.

    python -m experiments.benchmarks.search_table -o FOLDER
    python -m experiments.benchmarks.search_table -o FOLDER --tuned KJV.whl

Rows: perplexity of the last 256 tokens of held-out texts and passkeys found, at 4 and 8 times the trained length;
then the paper's two ablations, start tokens (n-hat) and factors searched again for the trained length; then how
well cheaper readings of a candidate rank it. The factors are those of the first fold, whichever did best. Cells
are kept in FOLDER.
"""

import argparse
import json
import math
import random
from pathlib import Path

import numpy as np
import torch

from ctxext import methods
from ctxext.evals.compare.cells import CROP, UNPATCHED, Cells, Variant
from ctxext.evals.models import TINY_TEXTS, load
from ctxext.files import write_json
from ctxext.rope import unpatched
from ctxext.search import documents
from ctxext.search.evaluator import Evaluator, Problem
from ctxext.search.space import Candidate, Space, factors_of
from ctxext.search.strategies import get
from ctxext.text import TokenDocuments
from experiments.benchmarks.search import Bench

DEPTHS, TRIALS, TRAINED = (0.0, 0.25, 0.5, 0.75, 1.0), 8, 256
PLAIN_N = (0, 4, 16, 64, 128)


def found_by(runs: list[dict], strategy: str) -> dict:
    return next(r for r in runs if r["strategy"] == strategy and r["fold"] == 0)


def options(run: dict, **more) -> dict:
    return {"long_factor": run["factors"], "start_tokens": run["start_tokens"], **more}


def text_of(bench: Bench) -> TokenDocuments:
    """The held-out documents of a search, as the evaluators take them."""
    names = [f"held out {i}" for i in range(len(bench.others))]
    return TokenDocuments([list(d.ids) for d in bench.others], names, documents.digest(bench.others))


def row(label: str, ppl: dict, passkey: dict) -> dict:
    last, keys = ppl[label]["buckets"][-1], passkey[label]["lengths"][0]
    kept = {"ppl": last["ppl"], "ppl_low": last["low"], "ppl_high": last["high"]}
    return {"schedule": label, **kept, "passkey": keys["correct"], "trials": keys["trials"]}


def measure(bench: Bench, subject, variants: list[Variant], folder: Path) -> list[dict]:
    """Rows of perplexity and passkey at the target length, the crop control first."""
    cells, length = Cells(subject, folder), len(bench.others[0].ids)
    ppl = cells.ppl(variants, text_of(bench), [length], bucket=TRAINED, bos=None)
    keys = cells.passkey(variants, [length], depths=DEPTHS, trials=TRIALS, batch=TRIALS)
    return [row(label, ppl, keys) for label in ppl]


def search_short(bench: Bench, run: dict) -> tuple[list[float], int]:
    """Factors searched again for texts of the trained length, from the original ones; and the tokens spent."""
    texts = documents.plain(ids[:TRAINED] for ids in bench.cut[: len(bench.mine)])
    space = Space(bench.rope.size, 1.0, start_tokens=(run["start_tokens"],))

    def losses(candidate: Candidate, which) -> list[float]:
        more = {"short_factor": list(candidate.factors)}
        schedule = methods.schedule(bench.rope, "longrope", bench.factor, **options(run, **more))
        return bench.fitness(schedule, [texts[d] for d in which])

    evaluator = Evaluator(space, losses, [len(d.ids) for d in texts])
    start = {"original": space.candidate([1.0] * space.size, run["start_tokens"])}
    get("curve")(Problem(space, start, evaluator, random.Random("0/short"), 0))
    return list(evaluator.best.factors), evaluator.tokens


def search_needles(bench: Bench) -> dict:
    """What `curve` finds on keys hidden in the same documents, one in each, instead of on their text."""
    needles = documents.needles([list(d.ids) for d in bench.mine], bench.tokenizer, 0)
    evaluator = bench.evaluator("curve-needles", needles)
    get("curve")(Problem(bench.space, bench.seeds, evaluator, random.Random("0/long"), 0))
    best = evaluator.best
    return {"factors": list(best.factors), "start_tokens": best.start_tokens, "loss": evaluator.best_loss}


def mean(bench: Bench, schedule, length: int | None = None) -> float:
    """Perplexity of all tokens of the held-out documents, or of their beginnings."""
    texts = documents.plain(list(d.ids)[:length] for d in bench.others)
    losses = bench.fitness(schedule, texts)
    return math.exp(sum(losses) / len(losses))


def start_token_ablation(bench: Bench, run: dict) -> list[dict]:
    """Held-out perplexity by n-hat: of the searched factors, PI and NTK (the paper has the last two)."""
    factors = {"searched": run["factors"]}
    factors |= {n: factors_of(methods.schedule(bench.rope, n, bench.factor)) for n in ("pi", "ntk", "yarn")}
    rows = []
    for name, values in factors.items():
        chosen = sorted({*PLAIN_N, run["start_tokens"]} if name == "searched" else PLAIN_N)
        for n in chosen:
            schedule = methods.schedule(bench.rope, "longrope", bench.factor, long_factor=values, start_tokens=n)
            rows.append({"factors": name, "start_tokens": n, "ppl": mean(bench, schedule)})
    return rows


def short_ablation(bench: Bench, run: dict, short: list[float]) -> list[dict]:
    """Held-out perplexity at the trained length."""

    def long(**more):
        return methods.schedule(bench.rope, "longrope", bench.factor, **options(run, **more))

    ones = [1.0] * bench.rope.size
    schedules = {"unpatched": unpatched(bench.rope), "long factors everywhere": long()}
    schedules |= {"original below": long(short_factor=ones), "searched again below": long(short_factor=short)}
    return [{"schedule": name, "ppl": mean(bench, schedule, TRAINED)} for name, schedule in schedules.items()]


def fidelity(bench: Bench, count: int = 24) -> list[dict]:
    """Rank correlation of cheap readings with the mean over whole documents, early and late in the search.

    Cheap: the beginnings of all documents, or one whole document, on candidates that the search itself tried.
    """
    lines = [
        json.loads(line) for line in (bench.folder / "curve-0.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    ]
    tried = list(dict.fromkeys(Candidate(tuple(r["factors"]), r["start_tokens"]) for r in lines))
    length, rng, rows = len(bench.mine[0].ids), random.Random(0), []
    for when, pool in (("early", tried[: len(tried) // 3]), ("late", tried[-len(tried) // 3 :])):
        some = rng.sample(pool, count)
        whole = np.array([bench.fitness(bench.schedule(c), bench.mine) for c in some])
        for share in (0.25, 0.5, 0.75):
            texts = documents.plain(d.ids[: round(length * share)] for d in bench.mine)
            cut = np.array([bench.fitness(bench.schedule(c), texts) for c in some])
            rows.append({"when": when, "read": f"{share:g} of each", "rank": ranks(cut.mean(1), whole.mean(1))})
        for d in range(len(bench.mine)):
            rows.append({"when": when, "read": f"document {d}", "rank": ranks(whole[:, d], whole.mean(1))})
    return rows


def ranks(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def tune(name: str, factor: int, params: dict, text: str, folder: Path) -> Path:
    """The adapter of recipes/tiny-yarn-8x.yaml with another method, factor and target."""
    from ctxext.training.recipe import load_recipe
    from ctxext.training.run import train

    out = folder / f"tuned-{name}"
    if not (out / "adapter" / "config.json").is_file():
        recipe = Path(__file__).parents[2] / "recipes" / "tiny-yarn-8x.yaml"
        changes = ["method=" + json.dumps({"name": name, "factor": factor, **params})]
        changes += [f"output={out}", f"data.sources.0.path={text}", f"positions.target={TRAINED * factor}"]
        changes += ["eval.before=false", "eval.after=false", "train.save_steps=50"]
        train(load_recipe(recipe, changes), resume=out.exists())
    return out / "adapter"


def after_tuning(bench: Bench, run: dict, text: str, folder: Path) -> list[dict]:
    rows = []
    for name, params in (("pi", {}), ("ntk", {}), ("yarn", {}), ("longrope", options(run))):
        adapter = tune(name, int(bench.factor), params, text, folder)
        label = "searched" if name == "longrope" else name
        variant = Variant(f"{label}, tuned", name, bench.factor, params)
        rows += [
            r
            for r in measure(bench, load(adapter, dtype="float32"), [variant], folder / f"cells-tuned-{name}")
            if r["schedule"] != CROP
        ]
    return rows


def markdown(found: dict) -> str:
    lines = []
    for label, entry in found.items():
        lines += [f"\n{label}\n", "| schedule | perplexity | 95 % | passkey |", "|---|--:|--:|--:|"]
        for r in entry["rows"]:
            interval = f"{r['ppl_low']:.1f}-{r['ppl_high']:.1f}"
            lines.append(f"| {r['schedule']} | {r['ppl']:.2f} | {interval} | {r['passkey']}/{r['trials']} |")
        by_n: dict[str, list[str]] = {}
        for r in entry["start_tokens"]:
            by_n.setdefault(r["factors"], []).append(f"{r['start_tokens']}: {r['ppl']:.2f}")
        lines += ["", *(f"n-hat, {name}: " + ", ".join(cells) for name, cells in by_n.items()), ""]
        lines += [f"at the trained length, {r['schedule']}: {r['ppl']:.3f}" for r in entry["short"]]
        lines += [f"rank correlation, {r['when']}, {r['read']}: {r['rank']:.2f}" for r in entry["fidelity"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--factors", default="4,8")
    parser.add_argument("--tuned", metavar="KJV.whl", help="Text to tune on; see recipes/tiny-yarn-8x.yaml.")
    parser.add_argument("--tuned-factors", default="4,8", help="factors to tune at")
    args = parser.parse_args()
    torch.set_num_threads(1)
    searches = json.loads((args.out / "search.json").read_text(encoding="utf-8"))
    texts, out = [path.read_text(encoding="utf-8") for path in TINY_TEXTS], args.out / "search-table.json"
    found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    for factor in map(int, args.factors.split(",")):
        folder = args.out / f"tiny-{factor}x"
        bench = Bench("tiny", texts, factor, folder, "float32")
        runs = searches[f"tiny {factor}x"]["runs"]
        run = found_by(runs, "curve")
        short, tokens = search_short(bench, run)
        bare = {**options(run), "start_tokens": 0}
        needles = search_needles(bench)
        variants = [UNPATCHED, *(Variant(name, name, factor) for name in ("pi", "ntk", "yarn", "dynamic_yarn"))]
        variants += [
            Variant("searched by evolution", "longrope", factor, options(found_by(runs, "evolution"))),
            Variant("searched", "longrope", factor, options(run)),
            Variant("searched with needles", "longrope", factor, options(needles)),
            Variant("searched, without start tokens", "longrope", factor, bare),
            Variant("searched, short factors too", "longrope", factor, options(run, short_factor=short)),
        ]
        rows = measure(bench, load("tiny", dtype="float32"), variants, folder / "cells")
        if args.tuned and str(factor) in args.tuned_factors.split(","):
            rows += after_tuning(bench, run, args.tuned, folder)
        found[f"tiny {factor}x"] = {
            "rows": rows,
            "start_tokens": start_token_ablation(bench, run),
            "short": short_ablation(bench, run, short),
            "short_factor": short,
            "needles": needles,
            "fidelity": fidelity(bench),
            "short_tokens": tokens,
        }
    print(markdown(found))
    write_json(out, found, indent=1)


if __name__ == "__main__":
    main()
