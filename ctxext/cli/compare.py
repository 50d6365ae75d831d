"""`ctxext compare`: a thin command over `evals/compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import terminal
from .eval_options import Attention, Data, Factor, Lengths, ModelDtype, emit, parse_lengths
from .options import Existing, Json, Model, TrainedLength


def compare(
    model: Model,
    methods: Annotated[
        str, typer.Option(help="Comma-separated, options after colons: pi,ntk,yarn:beta_fast=16.")
    ] = "pi,ntk,yarn",
    factor: Factor = 4.0,
    lengths: Lengths = None,
    data: Data = None,
    suite: Annotated[str, typer.Option(help="quick, report, or a YAML file of your own.")] = "quick",
    budget: Annotated[
        str | None, typer.Option(help="Time to fit into, such as 10m; says what it drops for that.")
    ] = None,
    dtype: ModelDtype = "auto",
    attention: Attention = "auto",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Folder for report.html, rows.csv and the cells.")
    ] = Path("report"),
    json: Json = False,
) -> None:
    """Compare methods on one model, each against cropping: table, HTML report, CSV and JSONL. Resumable."""
    from ..evals.compare import run as comparison
    from ..evals.compare.budget import parse_budget
    from ..evals.compare.suite import read_suite
    from ..evals.measure import default_lengths
    from ..evals.models import load, texts_for

    variants = comparison.parse_methods(methods, factor)
    chosen, limit = read_suite(suite), parse_budget(budget) if budget else None
    paths = texts_for(model, data)
    subject = load(model, dtype=dtype, attention=attention, trained_length=trained_length, existing=existing)
    base = subject.start().trained_length
    step = max(1, base // 16)
    # Whole steps, so that one width of buckets suits every length.
    target = round(base * factor) // step * step
    asked = parse_lengths(lengths) or default_lengths(subject.trained_length, target)
    answer = comparison.run(subject, variants, asked, chosen, paths, out, limit=limit)
    if json:
        emit(answer)
        return
    comparison.show(answer)
    terminal.say(terminal.escape(f"report: {out / 'report.html'}; rows: {out / 'rows.csv'}, {out / 'rows.jsonl'}"))
