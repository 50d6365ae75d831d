"""`evaluate`: measure one model and its crop control; what `ctxext eval` answers, as plain data.

The options of each kind are declared once, in the signatures below: `ctxext eval` is made from them.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import files, text
from ..errors import UsageError, nearest
from ..folders.source import ModelDtype
from ..terminal import say
from . import Aggregation, Kind, PresetName, models, results
from .models import Subject

Load = Callable[..., Subject]
"""Gives the model, or the one that is named, loaded alike. It is called once what was asked for has been checked,
as loading takes long."""
Paths = Sequence[str | Path]
Crop = Annotated[bool, typer.Option("--crop/--no-crop", help="Measure the crop control too.")]
Resume = Annotated[
    Path | None, typer.Option(help="JSONL file that keeps finished cells; a stopped run goes on from it.")
]


def evaluate(
    model: Any,
    *,
    kind: Kind = "ppl",
    lengths: Sequence[int] | None = None,
    data: str | Path | Paths | None = None,
    method: str | None = None,
    factor: float = 4.0,
    method_options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    dtype: ModelDtype = "auto",
    attention: str = "auto",
    trained_length: int | None = None,
    existing: str = "refuse",
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `ctxext eval KIND MODEL --json` prints: {"model", "schedule", "settings", "results", ...} and, where it
    was measured, "control": the unpatched model reading only its last trained-length tokens.

    model: a folder, a hub id, a .gguf file or `tiny`, patched by `method` at `factor` if one is given; or a live
    model as it is, with its `tokenizer`. lengths: tokens, by default half the trained length up to the target.
    data: text for ppl and longppl; see `text.load_texts`. options: those of the kind, below: `documents=4`,
    `trials=20`. out: a file to write the document to. Raises UsageError for what can't be asked, CtxextError for
    what can't be measured.
    """
    if kind not in MEASURES:
        raise UsageError(f"there is no evaluation {kind!r}", hint=nearest(kind, MEASURES))
    measure = MEASURES[kind]
    known = inspect.signature(measure).parameters
    given: dict[str, Any] = {"seed": seed, "lengths": lengths, "data": data, **options}
    for name, value in list(given.items()):
        if name not in known:
            if value is not None:
                raise UsageError(f"{kind} has no option {name!r}", hint=nearest(name, known))
            del given[name]
    if "data" in given:
        given["data"] = partial(models.texts_for, model, [data] if isinstance(data, (str, Path)) else data)
    if method is None and method_options:
        raise UsageError(f"{next(iter(method_options))} is an option of a method", hint="say which with method")
    named = isinstance(model, (str, os.PathLike))
    if method is not None and not named:
        raise UsageError("a live model is measured as it is", hint="patch it first: ctxext.patch(model, method)")

    def load(other: str | None = None) -> Subject:
        if other is not None:
            return models.load(other, dtype=dtype, attention=attention)
        if not named:
            return models.of_live(model, tokenizer)
        patching = {"method": method, "factor": factor, "params": dict(method_options or {})}
        loading = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
        return models.load(model, **patching, **loading)

    document = measure(load, **given)
    if out is not None:  # before it is paired, so that what was measured isn't lost if it can't be
        files.write_json(out, document)
    if given.get("against"):
        from .compare import pairs

        document["against"] = pairs.paired(document, pairs.read_baseline(given["against"]), seed=seed)
        if out is not None:
            files.write_json(out, document)
    return document


def default_lengths(trained: int, target: int) -> list[int]:
    """Half the trained length, doubling up to the target, which is the last. A target that isn't beyond the
    trained length counts as twice that."""
    top, lengths = target if target > trained else 2 * trained, [trained // 2]
    while lengths[-1] * 2 < top:
        lengths.append(lengths[-1] * 2)
    return [*lengths, top]


def _lengths(subject: Subject, lengths: Sequence[int] | None) -> list[int]:
    return sorted(set(lengths or default_lengths(subject.trained_length, subject.schedule.max_length)))


def _document(subject: Subject, settings: dict, rows: list[dict], **more: Any) -> dict[str, Any]:
    return results.result_document(
        subject.name, subject.description(), settings, rows, model=subject.model, **more
    )


def ppl(
    load: Load,
    data: Callable[[], Paths],
    lengths: Sequence[int] | None = None,
    *,
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
    seed: int = 0,
) -> dict[str, Any]:
    """Perplexity by length and by position, from one prefill per document.

    See `perplexity.prefix_curve`, `crop_control` and `sliding_window`.
    """
    only = {"bucket": bucket, "prefill": prefill, "crop": crop, "crop-stride": crop_stride, "against": against}
    _check_ppl(stride, aggregation, only)
    from . import perplexity
    from .compare import pairs

    baseline = pairs.read_baseline(against) if against else None
    paths, subject = data(), load()
    asked, trained = _lengths(subject, lengths), subject.trained_length
    bos = text.bos_id(subject.tokenizer)
    found = text.documents(paths, subject.tokenizer, max(asked), documents, whole=stride is not None)
    source = {"data_sha256": found.sha256, "documents": found.names}
    if stride is not None:
        common = {"bos": bos, "aggregation": aggregation or "window"}
        rows = [
            {"length": n} | perplexity.sliding_window(subject.model, found.ids, n, stride, **common) for n in asked
        ]
        settings = {"measure": "sliding window", "stride": stride, "trained_length": trained}
        return _document(subject, settings, rows, **source)
    controlled = crop is not False and max(asked) > trained
    if controlled and crop_stride is not None:
        perplexity.check_crop(trained, crop_stride, bos)
    if baseline:
        pairs.check(baseline, lengths=asked, bucket=bucket, **source)
    shared = {"bucket": bucket, "bos": bos, "seed": seed}
    curve = perplexity.prefix_curve(subject.model, found.ids, asked, prefill=prefill, **shared)
    more: dict[str, Any] = {"buckets": curve.buckets}
    if controlled:
        with subject.as_trained():
            control = perplexity.crop_control(
                subject.model, found.ids, asked, trained, stride=crop_stride, **shared
            )
        more["control"] = {"rows": control.rows, "buckets": control.buckets}
    more["per_document"] = curve.documents
    return _document(subject, curve.settings | {"trained_length": trained}, curve.rows, **source, **more)


def _check_ppl(stride: int | None, aggregation: str | None, only: dict[str, Any]) -> None:
    """Raise UsageError for options of `ppl` that can't go together. only: those of the measurement without
    --stride, None where not given."""
    given = [name for name, value in only.items() if value is not None and value is not False]
    if stride is not None and given:
        raise UsageError(f"--stride has no --{given[0]}", hint="measure by prefix, without --stride")
    if aggregation is not None and stride is None:
        raise UsageError("--aggregation needs --stride")
    if only["crop"] is False and only["crop-stride"] is not None:
        raise UsageError("--crop-stride needs --crop")


def passkey(
    load: Load,
    lengths: Sequence[int] | None = None,
    *,
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
    seed: int = 0,
) -> dict[str, Any]:
    """Retrieval of a five-digit key by length and depth, at exact lengths.

    See `passkey.passkey`.
    """
    from . import passkey as grid

    subject = load()
    asked = _lengths(subject, lengths)
    measure = partial(
        grid.passkey,
        subject.model,
        subject.tokenizer,
        asked,
        depths=depths_of(depths),
        trials=trials,
        seed=seed,
        batch_size=batch_size,
        preset=preset,
        haystack=_text_of(haystack),
        distractors=distractors,
        resume=resume,
        identity=json.dumps(subject.identity(), sort_keys=True),
    )
    found = measure(generate=generate, reuse=reuse)
    return _with_control(subject, found, measure if crop and max(asked) > subject.trained_length else None)


def depths_of(count: int) -> list[float]:
    """So many depths from 0 (start) to 1 (end); one is in the middle."""
    return [i / (count - 1) for i in range(count)] if count > 1 else [0.5]


def ruler(
    load: Load,
    lengths: Sequence[int] | None = None,
    *,
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
    seed: int = 0,
) -> dict[str, Any]:
    """RULER-type tasks at exact lengths, made on the spot, and the effective length.

    See `ruler.run.ruler`. Without `lengths` what doesn't fit of the default lengths and tasks is left out, and
    said so.
    """
    from .ruler import run

    wished = tasks.split(",") if tasks else None
    subject = load()
    asked = _lengths(subject, lengths)
    form: dict[str, Any] = {"seed": seed, "haystack": _text_of(haystack), "example": example}
    chosen = wished or list(run.DEFAULT_TASKS)
    if lengths is None:
        wanted = [*asked, *chosen]
        asked, chosen = run.grid_that_fits(subject.tokenizer, asked, wished, **form)
        out = [str(part) for part in wanted if part not in (*asked, *chosen)]
        if out:
            say(f"left out, as prompts don't fit: {', '.join(out)}; see --lengths and --tasks")
    measure = partial(
        run.ruler,
        subject.model,
        subject.tokenizer,
        asked,
        tasks=chosen,
        samples=samples,
        batch_size=batch_size,
        threshold=threshold,
        resume=resume,
        identity=json.dumps(subject.identity(), sort_keys=True),
        **form,
    )
    found = measure()
    control = measure if crop and max(asked) > subject.trained_length else None
    return _with_control(subject, found, control, effective_length=found.effective)


def _with_control(subject: Subject, found: Any, measure: Callable[..., Any] | None, **more: Any) -> dict[str, Any]:
    """The document of a grid of cells; with `measure`, also what it finds in the crop."""
    more = {"lengths": found.lengths, **more}
    if measure is not None:
        with subject.as_trained():
            control = measure(crop=subject.trained_length)
        more["control"] = {"rows": control.rows, "lengths": control.lengths}
    settings = found.settings | {"trained_length": subject.trained_length}
    return _document(subject, settings, found.rows, **more)


def _text_of(path: str | Path | None) -> str | None:
    return None if path is None else "\n".join(part.text for part in text.load_texts(path))


def longppl(
    load: Load,
    data: Callable[[], Paths],
    *,
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
    seed: int = 0,
) -> dict[str, Any]:
    """Perplexity of the tokens that need the long context, and what the context gains by position.

    See `longppl.longppl`.
    """
    from . import longppl as keyed

    texts = text.load_texts(data())[:documents]
    subject = load()
    other = None if judge is None else load(judge)
    options: dict[str, Any] = {}
    if other is not None:
        options = {"judge": other.model, "judge_tokenizer": other.tokenizer}
        options["judge_bos"] = text.bos_id(other.tokenizer)
    found = keyed.longppl(
        subject.model,
        subject.tokenizer,
        texts,
        length=length,
        short=short or min(keyed.SHORT, subject.trained_length // 2),
        bucket=bucket,
        bos=text.bos_id(subject.tokenizer),
        seed=seed,
        **options,
    )
    row = {k: getattr(found, k) for k in ("longppl", "low", "high", "key_tokens", "tokens", "ppl")}
    settings = found.settings | {"judge": "itself" if other is None else other.name}
    more = {"gains": found.gains, "per_document": found.documents}
    return _document(subject, settings, [row], data_sha256=text.digest(texts), **more)


MEASURES: dict[Kind, Callable[..., dict[str, Any]]] = {
    "ppl": ppl,
    "passkey": passkey,
    "ruler": ruler,
    "longppl": longppl,
}
