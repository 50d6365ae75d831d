"""`ctxext eval longppl`, `ruler` and `lm-eval`: thin commands, heavy imports inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import terminal
from ..errors import CtxextError, UsageError
from .eval_options import (
    Attention,
    Crop,
    Data,
    Factor,
    Lengths,
    ModelDtype,
    Out,
    Resume,
    Seed,
    data_of,
    emit,
    finish,
    haystack_of,
    identity,
    name_of,
    parse_lengths,
    subject_of,
)
from .options import Existing, Json, Model, OptionalMethod, Set, TrainedLength


def longppl(
    model: Model,
    data: Data = None,
    length: Annotated[int | None, typer.Option(help="Read the first tokens of each text; default all.")] = None,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
    documents: Annotated[int | None, typer.Option(help="How many texts; default all.", min=1)] = None,
    judge: Annotated[
        str | None, typer.Option(help="Model that says which tokens are key; default the model itself.")
    ] = None,
    short: Annotated[
        int | None,
        typer.Option(help="Least tokens of the short context; default 4096 or half the trained length.", min=2),
    ] = None,
    bucket: Annotated[int | None, typer.Option(help="Tokens per position bucket of the context gain.")] = None,
    dtype: ModelDtype = "auto",
    attention: Attention = "sdpa",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """Perplexity of the tokens that need the long context, and what the context gains by position."""
    from .. import text
    from ..evals import longppl as measure
    from ..evals import models, results

    texts = text.load_texts(data_of(model, data))[:documents]
    more = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
    subject = subject_of(model, method, factor, settings, **more)
    other = models.load(judge, dtype=dtype, attention=attention) if judge else None
    theirs = {} if other is None else {
        "judge": other.model,
        "judge_tokenizer": other.tokenizer,
        "judge_bos": text.bos_id(other.tokenizer),
    }  # fmt: skip
    found = measure.longppl(
        subject.model,
        subject.tokenizer,
        texts,
        length=length,
        short=short or min(measure.SHORT, subject.trained_length // 2),
        bucket=bucket,
        bos=text.bos_id(subject.tokenizer),
        seed=seed,
        **theirs,
    )
    row = {k: getattr(found, k) for k in ("longppl", "low", "high", "key_tokens", "tokens", "ppl")}
    document = results.result_document(
        subject.name,
        subject.description(),
        found.settings | {"judge": "itself" if other is None else other.name},
        [row],
        model=subject.model,
        data_sha256=text.digest(texts),
        gains=found.gains,
        per_document=found.documents,
    )
    if not json:
        shown = "no key tokens" if found.longppl is None else f"LongPPL {found.longppl:.3f}"
        title = (
            f"{name_of(document)}: {shown} on {found.key_tokens:,} of {found.tokens:,} tokens; ppl {found.ppl:.3f}"
        )
        table = [
            [f"{g['start']:,}-{g['end']:,}", *(f"{g[k]:.4f}" for k in ("short", "full")), f"{g['gain']:+.4f}"]
            for g in found.gains
        ]
        terminal.print_table(title, ["position", "nll, short context", "nll, all of it", "context gain"], table)
    finish(document, out, json)


def ruler(
    model: Model,
    lengths: Lengths = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated; default the seven that need least.")] = None,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
    samples: Annotated[int, typer.Option(help="Samples per task and length.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Prompts per generation.", min=1)] = 1,
    haystack: Annotated[Path | None, typer.Option(help="Text file or folder for the essay tasks.")] = None,
    example: Annotated[
        bool, typer.Option("--example/--no-example", help="One-shot examples of vt and cwe.")
    ] = True,
    threshold: Annotated[float, typer.Option(help="Percent that a length must exceed to be effective.")] = 85.6,
    crop: Crop = True,
    resume: Resume = None,
    dtype: ModelDtype = "auto",
    attention: Attention = "sdpa",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """RULER-type tasks at exact lengths, made on the spot, and the effective length."""
    from ..evals import results
    from ..evals.ruler import run as measure

    more = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
    subject = subject_of(model, method, factor, settings, **more)
    asked = parse_lengths(lengths, subject.trained_length, subject.schedule.max_length)
    form: dict[str, Any] = {"seed": seed, "haystack": haystack_of(haystack), "example": example}
    chosen = tasks.split(",") if tasks else None
    if lengths is None:
        wanted = asked, chosen or measure.DEFAULT_TASKS
        asked, chosen = measure.grid_that_fits(subject.tokenizer, asked, chosen, **form)
        _say_left_out(wanted, (asked, chosen))
    common = {"tasks": chosen or measure.DEFAULT_TASKS, "samples": samples, "batch_size": batch_size, **form}
    common |= {"threshold": threshold, "resume": resume, "identity": identity(subject)}
    found = measure.ruler(subject.model, subject.tokenizer, asked, **common)
    further: dict[str, Any] = {"lengths": found.lengths, "effective_length": found.effective}
    if crop and max(asked) > subject.trained_length:
        with subject.as_trained():
            control = measure.ruler(subject.model, subject.tokenizer, asked, crop=subject.trained_length, **common)
        further["control"] = {"rows": control.rows, "lengths": control.lengths}
    document = results.result_document(
        subject.name,
        subject.description(),
        found.settings | {"trained_length": subject.trained_length},
        found.rows,
        model=subject.model,
        **further,
    )
    if not json:
        _print_ruler(document)
    finish(document, out, json)


def _say_left_out(wanted: tuple, kept: tuple) -> None:
    out = [str(part) for had, has in zip(wanted, kept, strict=True) for part in had if part not in has]
    if out:
        terminal.say(f"left out, as prompts don't fit: {', '.join(out)}; see --lengths and --tasks")


def _print_ruler(document: dict[str, Any]) -> None:
    control = {(r["task"], r["length"]): r for r in document.get("control", {}).get("rows", [])}
    table = []
    for row in document["results"]:
        line = [row["task"], f"{row['length']:,}", row["samples"], f"{row['score']:.0%}"]
        line.append(f"{row['low']:.0%}-{row['high']:.0%}")
        table.append(line + ([f"{control[row['task'], row['length']]['score']:.0%}"] if control else []))
    table += [
        ["mean", f"{r['length']:,}", "", f"{r['score']:.0%}", ""] + [""] * bool(control)
        for r in document["lengths"]
    ]
    effective = document["effective_length"]
    title = f"{name_of(document)}: effective length {f'{effective:,}' if effective else 'none'}"
    columns = ["task", "tokens", "samples", "score", "95 %"] + (["crop"] if control else [])
    terminal.print_table(title, columns, table)


def lm_eval(
    model: Model,
    tasks: Annotated[str, typer.Option(help="Comma-separated task names; ours start with ctxext_.")],
    include_path: Annotated[list[Path] | None, typer.Option(help="Folder with more tasks (repeatable).")] = None,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
    lengths: Lengths = None,
    metadata: Annotated[str | None, typer.Option(help="JSON object that is passed to the tasks.")] = None,
    limit: Annotated[int | None, typer.Option(help="Documents per task.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts per forward.", min=1)] = 1,
    max_length: Annotated[int | None, typer.Option(help="Tokens; default what the schedule is for.")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut prompts that don't fit, from the left.")
    ] = False,
    dtype: ModelDtype = "auto",
    attention: Attention = "sdpa",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the harness's results file.")] = None,
    json: Json = False,
) -> None:
    """Tasks of lm-evaluation-harness on a patched model, results in its own schema."""
    import json as json_module

    from ..folders.source import resolve

    try:
        from ..evals.lm_eval.model import CtxextLM
        from ..evals.lm_eval.tasks import evaluate
    except ImportError as error:
        raise CtxextError(f"this needs lm-eval: {error}", hint="pip install 'ctxext[eval]'") from error
    try:
        extra = json_module.loads(metadata) if metadata else {}
    except ValueError as error:
        raise UsageError(f"--metadata isn't JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UsageError("--metadata must be a JSON object", hint="""for example '{"trials": 10}'""")
    more = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
    subject = subject_of(model, method, factor, settings, **more)
    known: dict[str, Any] = {"tokenizer": str(resolve(model))}
    if lengths:
        known["max_seq_lengths"] = parse_lengths(lengths, subject.trained_length, subject.trained_length)
    lm = CtxextLM(subject, max_length=max_length, batch_size=batch_size, truncate=truncate)
    found = evaluate(
        lm, tasks.split(","), include_path=include_path or (), metadata=known | extra, limit=limit, out=out
    )
    if json:
        from lm_eval.utils import handle_non_serializable

        plain = json_module.loads(json_module.dumps(found, default=handle_non_serializable))
        emit(plain)
        return
    from lm_eval.utils import make_table

    print(make_table(found))
