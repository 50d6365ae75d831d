"""`ctxext eval`: a command for each kind of evaluation, made from its signature in `evals/measure.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from .. import terminal
from ..errors import CtxextError, UsageError
from ..evals import Kind
from ..evals.measure import MEASURES, evaluate
from . import eval_tables as tables
from .eval_options import (
    Attention,
    Data,
    Factor,
    Lengths,
    ModelDtype,
    Out,
    Plot,
    Seed,
    emit,
    parse_lengths,
)
from .options import Existing, Json, Model, OptionalMethod, Set, TrainedLength, method_settings

app = typer.Typer(
    help="Measure a model at long context. Every figure comes with its crop control: the unpatched model "
    "reading only its last trained-length tokens.",
    no_args_is_help=True,
)


def _shared(
    model: Model,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
    dtype: ModelDtype = "auto",
    attention: Attention = "auto",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """The options that every kind has."""


def _register(kind: Kind, show: Callable[[dict[str, Any]], None], *, drawn: bool = False) -> None:
    """`ctxext eval KIND`, made from the signature of what measures it: `evaluate` measures, `show` prints."""
    measure = MEASURES[kind]
    found: dict[str, inspect.Parameter] = {}
    for source in (_shared, measure):
        hints = get_type_hints(source, include_extras=True) | ({} if source is _shared else _READ)
        for name, parameter in inspect.signature(source).parameters.items():
            kept = found.get(name, parameter.replace(annotation=hints[name]))
            found[name] = kept.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    del found["load"]
    if drawn:
        found["plot"] = inspect.Parameter("plot", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Plot)
    if "data" in found:
        found["data"] = found["data"].replace(default=None)

    def command(model: str, settings: list[str] | None, json: bool, **given: Any) -> None:
        plot = given.pop("plot", None)
        if "lengths" in given:
            given["lengths"] = parse_lengths(given["lengths"])
        options = method_settings(given["method"], settings)
        document = evaluate(model, kind=kind, method_options=options, **given)
        if not json:
            show(document)
        if given["out"]:
            terminal.say(f"written to {terminal.escape(str(given['out']))}")
        if json:
            emit(document)
        if plot:
            from .. import plots
            from ..evals.plots import document_figure

            plots.save(document_figure(document), plot)

    # First what only this kind has.
    order = ["model", *(name for name in found if name not in inspect.signature(_shared).parameters)]
    order += [name for name in found if name not in order]
    command.__signature__ = inspect.Signature([found[name] for name in order])
    command.__annotations__, command.__doc__ = {}, (measure.__doc__ or "").partition("\n\n")[0]
    app.command(kind)(command)


_READ = {"data": Data, "lengths": Lengths}
"""What is written otherwise on a command line than in Python."""
_register("ppl", tables.print_ppl, drawn=True)
_register("passkey", tables.print_passkey, drawn=True)
_register("longppl", tables.print_longppl)
_register("ruler", tables.print_ruler)


@app.command("lm-eval")
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
    attention: Attention = "auto",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the harness's results file.")] = None,
    json: Json = False,
) -> None:
    """Tasks of lm-evaluation-harness on a patched model, results in its own schema."""
    import json as json_module

    from ..evals.models import load
    from ..folders.source import resolve

    try:
        from ..evals.lm_eval.model import CtxextLM
        from ..evals.lm_eval.tasks import evaluate as run
    except ImportError as error:
        raise CtxextError(f"this needs lm-eval: {error}", hint="pip install 'ctxext[eval]'") from error
    try:
        extra = json_module.loads(metadata) if metadata else {}
    except ValueError as error:
        raise UsageError(f"--metadata isn't JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UsageError("--metadata must be a JSON object", hint="""for example '{"trials": 10}'""")
    asked = parse_lengths(lengths)
    subject = load(
        model,
        method=method,
        factor=factor,
        params=method_settings(method, settings),
        dtype=dtype,
        attention=attention,
        trained_length=trained_length,
        existing=existing,
    )
    known: dict[str, Any] = {"tokenizer": str(resolve(model))} | ({"max_seq_lengths": asked} if asked else {})
    lm = CtxextLM(subject, max_length=max_length, batch_size=batch_size, truncate=truncate)
    found = run(
        lm, tasks.split(","), include_path=include_path or (), metadata=known | extra, limit=limit, out=out
    )
    from lm_eval.utils import handle_non_serializable, make_table

    if json:
        emit(json_module.loads(json_module.dumps(found, default=handle_non_serializable)))
    else:
        print(make_table(found))
