"""`ctxext eval`: each command declares the options of one kind of evaluation; `_evaluation` does the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from .. import terminal
from ..errors import CtxextError, UsageError
from ..evals import Aggregation, Kind, PresetName
from . import eval_tables as tables
from .eval_options import (
    Attention,
    Crop,
    Data,
    Factor,
    Lengths,
    ModelDtype,
    Out,
    Plot,
    Resume,
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
    attention: Attention = "sdpa",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """The options that every kind has."""


def _evaluation(show: Callable[[dict[str, Any]], None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function of options as `ctxext eval NAME`: `evaluate` measures, `show` prints its document."""

    def register(declared: Callable[..., None]) -> Callable[..., None]:
        def command(model: str, settings: list[str] | None, json: bool, **given: Any) -> None:
            from ..evals.measure import evaluate

            plot = given.pop("plot", None)
            if "lengths" in given:
                given["lengths"] = parse_lengths(given["lengths"])
            options = method_settings(given["method"], settings)
            document = evaluate(model, kind=cast(Kind, declared.__name__), method_options=options, **given)
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

        found: dict[str, inspect.Parameter] = {}
        for source in (_shared, declared):
            hints = get_type_hints(source, include_extras=True)
            for name, parameter in inspect.signature(source).parameters.items():
                found[name] = parameter.replace(annotation=hints[name])
        order = ["model", *(n for n in found if n not in inspect.signature(_shared).parameters)]
        order += [n for n in found if n not in order]
        command.__signature__ = inspect.Signature([found[name] for name in order])
        command.__annotations__, command.__doc__ = {}, declared.__doc__
        app.command(declared.__name__)(command)
        return declared

    return register


@_evaluation(tables.print_ppl)
def ppl(
    data: Data = None,
    lengths: Lengths = None,
    documents: Annotated[int, typer.Option(help="How many documents of the longest length.", min=1)] = 1,
    bucket: Annotated[
        int | None, typer.Option(help="Tokens per position bucket; default an eighth.", min=1)
    ] = None,
    crop: Annotated[
        bool | None, typer.Option("--crop/--no-crop", help="Measure the crop control too: the default.")
    ] = None,
    crop_stride: Annotated[
        int | None, typer.Option(help="Tokens scored per control window; default L/16.", min=1)
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Instead: YaRN's sliding window, this many tokens apart, at each length.", min=1),
    ] = None,
    aggregation: Annotated[
        Aggregation | None,
        typer.Option(help="With --stride: all tokens weigh alike, or all windows (as YaRN, the default)."),
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Read texts so many tokens at a time, if activations don't fit.", min=1)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier --out: also print the paired difference to it.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Perplexity by length and by position, from one prefill per document."""


@_evaluation(tables.print_passkey)
def passkey(
    lengths: Lengths = None,
    depths: Annotated[int, typer.Option(help="Depths from 0 (start) to 1 (end).", min=1)] = 5,
    trials: Annotated[int, typer.Option(help="Keys per length and depth.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Prompts per forward.", min=1)] = 1,
    crop: Crop = True,
    generate: Annotated[
        bool, typer.Option("--generate", help="Score by greedy generation (slower, equal).")
    ] = False,
    preset: Annotated[PresetName | None, typer.Option(help="A published form of the prompts.")] = None,
    haystack: Annotated[Path | None, typer.Option(help="Text file or folder to use as filler.")] = None,
    distractors: Annotated[int, typer.Option(help="Other keys in each prompt.", min=0)] = 0,
    reuse: Annotated[
        bool | None, typer.Option("--reuse/--no-reuse", help="Share prefills; by default where it is exact.")
    ] = None,
    resume: Resume = None,
    plot: Plot = None,
) -> None:
    """Retrieval of a five-digit key by length and depth, at exact lengths."""


@_evaluation(tables.print_longppl)
def longppl(
    data: Data = None,
    length: Annotated[int | None, typer.Option(help="Read the first tokens of each text; default all.")] = None,
    documents: Annotated[int | None, typer.Option(help="How many texts; default all.", min=1)] = None,
    judge: Annotated[
        str | None, typer.Option(help="Model that says which tokens are key; default the model itself.")
    ] = None,
    short: Annotated[
        int | None,
        typer.Option(help="Least tokens of the short context; default 4096 or half the trained length.", min=2),
    ] = None,
    bucket: Annotated[int | None, typer.Option(help="Tokens per position bucket of the context gain.")] = None,
) -> None:
    """Perplexity of the tokens that need the long context, and what the context gains by position."""


@_evaluation(tables.print_ruler)
def ruler(
    lengths: Lengths = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated; default the seven that need least.")] = None,
    samples: Annotated[int, typer.Option(help="Samples per task and length.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Prompts per generation.", min=1)] = 1,
    haystack: Annotated[Path | None, typer.Option(help="Text file or folder for the essay tasks.")] = None,
    example: Annotated[
        bool, typer.Option("--example/--no-example", help="One-shot examples of vt and cwe.")
    ] = True,
    threshold: Annotated[float, typer.Option(help="Percent that a length must exceed to be effective.")] = 85.6,
    crop: Crop = True,
    resume: Resume = None,
) -> None:
    """RULER-type tasks at exact lengths, made on the spot, and the effective length."""


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
    attention: Attention = "sdpa",
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
        from ..evals.lm_eval.tasks import evaluate
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
    found = evaluate(
        lm, tasks.split(","), include_path=include_path or (), metadata=known | extra, limit=limit, out=out
    )
    from lm_eval.utils import handle_non_serializable, make_table

    if json:
        emit(json_module.loads(json_module.dumps(found, default=handle_non_serializable)))
    else:
        print(make_table(found))
