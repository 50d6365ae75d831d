"""What a fine-tune did: runs of `ctxext train` before and after, in one table and two pictures.

    python -m experiments.smollm2.tuned out/pi-8x out/control -o out/tuned [--beside "crop control=crop.json"]

A run is an output folder whose recipe asks for `ppl` and `passkey` under eval.commands, with the same lengths in
each. `--beside` adds rows from an answer of `ctxext eval ppl|passkey --out`: the crop control of such a document
if it holds one, its own rows otherwise. Kept are tables, resolved recipes, losses and rows; no weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import plots, terminal
from ctxext.errors import CtxextError, UsageError
from ctxext.files import read_json, write_json
from experiments.tables import short, table

WHEN = ("before", "after")


@dataclass
class Line:
    """One row of the tables: perplexity by position and passkeys by length, as far as they were measured."""

    label: str
    buckets: list[dict] = field(default_factory=list)
    passkeys: list[dict] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)


def read_run(folder: Path) -> list[Line]:
    """The lines of one run: before and after. Raises CtxextError for a folder that isn't a finished run."""
    log = folder / "log.json"
    if not log.is_file():
        raise CtxextError(
            f"{folder} is no finished run: it has no log.json", hint="finish it: ctxext train --resume"
        )
    found = []
    for when in WHEN:
        line = Line(f"{folder.name}, {when}")
        for path in sorted((folder / f"eval-{when}").glob("*.json")):
            _add(line, read_json(path))
        found.append(line)
    if not any(line.buckets or line.passkeys for line in found):
        raise CtxextError(f"{folder} holds no evaluation", hint="ask for some under eval.commands in its recipe")
    history: Any = read_json(log)
    found[-1].losses = [(row["step"], row["loss"]) for row in history if "loss" in row]
    return found


def read_beside(given: str) -> Line:
    """`LABEL=FILE[,FILE]` as a line: the crop control of each document if it holds one, else its own rows."""
    label, _, paths = given.partition("=")
    if not label or not paths:
        raise UsageError(f"--beside {given!r} isn't LABEL=FILE")
    line = Line(label)
    for file in paths.split(","):
        document = read_json(Path(file))
        _add(line, document.get("control", document))
    return line


def _add(line: Line, document: dict[str, Any]) -> None:
    if "buckets" in document:
        line.buckets = document["buckets"]
    elif "lengths" in document:
        line.passkeys = document["lengths"]


def tables(lines: list[Line]) -> str:
    """Both tables as Markdown. Raises UsageError for lines that were measured at different places."""
    parts = []
    with_ppl = [line for line in lines if line.buckets]
    if with_ppl:
        cells = [[line.label, *(short(row["ppl"], whole_from=100) for row in line.buckets)] for line in with_ppl]
        places = [[row["end"] for row in line.buckets] for line in with_ppl]
        parts.append(_table("perplexity at position", places, cells))
    with_keys = [line for line in lines if line.passkeys]
    if with_keys:
        cells = [[line.label, *(f"{r['correct']}/{r['trials']}" for r in line.passkeys)] for line in with_keys]
        places = [[row["length"] for row in line.passkeys] for line in with_keys]
        parts.append(_table("passkey at length", places, cells))
    return "\n".join(parts)


def _table(what: str, places: list[list[int]], cells: list[list[str]]) -> str:
    if any(row != places[0] for row in places):
        raise UsageError(
            f"not the same places everywhere: {what}", hint="use the same lengths and bucket in each run"
        )
    return table([what, *map(plots.tokens, places[0])], cells)


def draw(lines: list[Line], trained_length: int, title: str):
    """Perplexity by position before (dotted) and after (solid), and the training losses."""
    plots.matplotlib()  # else its own error
    from matplotlib.ticker import LogLocator

    runs = list(dict.fromkeys(line.label.rpartition(", ")[0] for line in lines if ", " in line.label))
    colours = dict(zip(runs, plots.COLOURS * 3, strict=False))
    with plots.figure(11, 4.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
        for line in lines:
            run, _, when = line.label.rpartition(", ")
            style = {
                "color": colours.get(run, "black"),
                "linestyle": {"before": ":", "after": "-"}.get(when, "--"),
            }
            if line.buckets:
                places = [(row["start"] + row["end"]) / 2 for row in line.buckets]
                left.plot(places, [row["ppl"] for row in line.buckets], marker=".", label=line.label, **style)
            if line.losses:
                right.plot(*zip(*line.losses, strict=True), color=style["color"], label=run)
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("{x:g}")
        left.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        left.axvline(trained_length, color="#555555", linewidth=1, linestyle="-.")
        left.set(xlabel=f"position (line: trained length {plots.tokens(trained_length)})", ylabel="perplexity")
        left.set_title(title, loc="left", fontsize=11, fontweight="bold")
        right.set(xlabel="step", ylabel="training loss (nats)")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def portable(recipe: Path) -> str:
    """A resolved recipe with absolute paths cut down to names, as folders are one machine's alone."""
    import yaml

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: named(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [named(inner) for inner in value]
        return re.sub(r"(?<!\S)/(?:[^/\s]+/)+", "", value) if isinstance(value, str) else value

    return yaml.safe_dump(named(yaml.safe_load(recipe.read_text(encoding="utf-8"))), sort_keys=False)


def main(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of ctxext train.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the tables, pictures and recipes.")],
    beside: Annotated[list[str] | None, typer.Option(help="LABEL=FILE[,FILE]: rows to compare with.")] = None,
    trained_length: Annotated[int, typer.Option(help="What the model was trained with.", min=1)] = 256,
    title: str = "perplexity before and after",
) -> None:
    """Read the runs, print the tables, draw the picture, keep the recipes."""
    lines = [read_beside(given) for given in beside or []]
    for run in runs:
        lines += read_run(run)
    found = tables(lines)
    (out / "recipes").mkdir(parents=True, exist_ok=True)
    for run in runs:
        (out / "recipes" / f"{run.name}.yaml").write_text(portable(run / "recipe.yaml"), encoding="utf-8")
    (out / "tables.md").write_text(found, encoding="utf-8")
    write_json(out / "results.json", {"rows": [vars(line) for line in lines]})
    plots.save(draw(lines, trained_length, title), out / "tuned.png")
    print(found)
    terminal.say(f"tables, picture and resolved recipes in {terminal.escape(str(out))}")


if __name__ == "__main__":
    terminal.run(main)
