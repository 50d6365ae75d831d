"""`ctxext compare`: methods x lengths on one model, from cells to the report."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import files, methods, plots, terminal, text
from ...errors import UsageError
from ...methods.settings import parse_settings
from .. import results
from ..models import Subject
from . import budget, report, summary
from .cells import CROP, UNPATCHED, Cells, Variant, claim
from .suite import Suite


def parse_methods(given: str, factor: float) -> list[Variant]:
    """`pi,ntk,yarn:beta_fast=16:beta_slow=2` as variants at one factor; options are checked at once."""
    found = []
    for part in [p.strip() for p in given.split(",") if p.strip()]:
        name, *options = part.split(":")
        params = parse_settings(options)
        methods.get(name).check(params)
        found.append(Variant(f"{part} x{factor:g}", name, factor, params))
    if not found or len({variant.label for variant in found}) < len(found):
        raise UsageError(f"--methods {given!r} must name at least one method, and none twice")
    return found


def bucket_of(lengths: Sequence[int]) -> int:
    """The width of position buckets, so that one ends at every length: their greatest common divisor.

    Raises UsageError if that would make thousands of buckets.
    """
    width = math.gcd(*lengths)
    if max(lengths) // width > 512:
        raise UsageError(
            f"lengths {', '.join(map(str, lengths))} have no common step", hint="use multiples of one length"
        )
    return width


def run(
    subject: Subject,
    variants: Sequence[Variant],
    lengths: Sequence[int],
    suite: Suite,
    paths: Sequence[Any],
    out: Path,
    *,
    limit: float | None = None,
    say: Callable[[str], None] = terminal.say,
) -> dict[str, Any]:
    """Measure what `out` doesn't hold yet, write the report there, and return {"headline", "rows", "plan", ...}.

    `limit`: seconds. A plan that was made for the same request is kept in the folder, so that a run that goes on
    doesn't choose another. Under `accelerate launch` (RANK, WORLD_SIZE) processes share the cells, and the first
    writes the report. Of a scaled model, `subject.existing` says what counts as unpatched. Raises UsageError or
    CtxextError before anything is measured if the model can't be patched, a method can't be applied or there is
    too little text.
    """
    plots.matplotlib()
    rope, trained = subject.start(), subject.trained_length
    schedules = {v.label: methods.schedule(rope, v.method, v.factor, **v.params) for v in variants if v.method}
    lengths = sorted(set(lengths))
    suite.check(lengths)
    stride = max(1, trained // 16)
    plan = _planned(subject, variants, budget.Plan(suite, tuple(lengths)), out, limit, stride)
    if plan.estimate is not None:
        say(f"estimated at {plan.estimate:.0f} s")
    if plan.dropped:
        say(f"[yellow]to fit the budget, dropped:[/] {'; '.join(plan.dropped)}")
    suite, lengths = plan.suite, list(plan.lengths)
    docs = text.documents(paths, subject.tokenizer, max(lengths), suite.documents)
    everyone = [UNPATCHED, *variants]
    cells = Cells(subject, out / "cells", on_cell=lambda name: say(f"measuring {name}"))
    bos = text.bos_id(subject.tokenizer)
    ppl = cells.ppl(everyone, docs, lengths, bucket=bucket_of(lengths), bos=bos, crop_stride=stride)
    passkey: dict[int, dict] = {}
    ruler: dict[int, dict] = {}
    for length in lengths:
        if suite.passkey and suite.passkey.among([length]):
            spec = suite.passkey
            common = {"depths": spec.places(), "trials": spec.trials, "distractors": spec.distractors}
            passkey[length] = cells.passkey(everyone, [length], batch=1, **common)
        if suite.ruler and suite.ruler.among([length]):
            ruler[length] = cells.ruler(everyone, [length], **suite.ruler.model_dump(exclude={"lengths"}))
    table = summary.rows(ppl, passkey, ruler, lengths, trained)
    about = {
        "model": subject.name,
        "trained_length": trained,
        "plan": plan.to_dict(),
        "dropped": list(plan.dropped),
        "data_sha256": docs.sha256,
        "documents": docs.names,
        "environment": results.environment(subject.model),
    }
    if terminal.main_process():
        summary.write(table, out)
        model_type = getattr(subject.model.config, "model_type", "llama")
        html = report.page(table, ppl, passkey, ruler, schedules, about, model_type)
        files.write_text(out / "report.html", html)
    return {"headline": summary.headline(table), **about, "rows": table}


def _planned(
    subject: Subject, variants: Sequence[Variant], whole: budget.Plan, out: Path, limit: float | None, stride: int
) -> budget.Plan:
    """The plan for this request: the one in the folder, or a new one, made by one process while others wait."""
    if limit is None:
        return whole
    asked = [subject.identity(), whole.to_dict(), [v.label for v in variants], limit]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    path = out / "cells" / f"plan-{digest}.json"
    with claim(path, wait=True):
        if not path.is_file():
            speed = budget.measure_speed(subject.model, subject.trained_length)
            fitted = budget.fit(
                whole, limit * terminal.processes(), len(variants) + 1, subject.trained_length, stride, speed
            )
            files.write_json(path, fitted.to_dict())
    return budget.Plan.from_dict(files.read_json(path))


def show(answer: dict[str, Any]) -> None:
    """The headline and the table, on stdout."""
    for sentence in answer["headline"]:
        terminal.say(sentence)
    terminal.print_table(
        f"{answer['model']}, trained on {answer['trained_length']:,} tokens; gain: nats per token over the {CROP}",
        *summary.grid(answer["rows"]),
    )
