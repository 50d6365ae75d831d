"""`evaluate`: measure one model and its crop control; what `ctxext eval` answers, as plain data."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import files, text
from ..errors import UsageError, nearest
from ..terminal import say
from . import Aggregation, Dtype, Kind, PresetName, models, results
from .compare import pairs
from .models import Subject

Load = Callable[[], Subject]
"""Gives the model. It is called once what was asked for has been checked, as loading takes long."""
Paths = Sequence[str | Path]


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
    dtype: Dtype = "auto",
    attention: str = "sdpa",
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
    given: dict[str, Any] = {"seed": seed, "lengths": lengths, **options}
    for name, value in list(given.items()):
        if name not in known:
            if value is not None:
                raise UsageError(f"{kind} has no option {name!r}", hint=nearest(name, known))
            del given[name]
    if "data" in known:
        given["data"] = partial(models.texts_for, model, [data] if isinstance(data, (str, Path)) else data)
    if given.get("judge") is not None:
        given["judge"] = partial(models.load, given["judge"], dtype=dtype, attention=attention)
    if method is None and method_options:
        raise UsageError(f"{next(iter(method_options))} is an option of a method", hint="say which with method")
    if isinstance(model, (str, os.PathLike)):
        loading = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
        patching = {"method": method, "factor": factor, "params": dict(method_options or {})}
        load: Load = partial(models.load, model, **patching, **loading)
    elif method is not None:
        raise UsageError("a live model is measured as it is", hint="patch it first: ctxext.patch(model, method)")
    else:
        load = partial(models.of_live, model, tokenizer)
    document = measure(load, **given)
    if out is not None:  # before it is paired, so that what was measured isn't lost if it can't be
        files.write_json(out, document)
    if given.get("against"):
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
    documents: int = 1,
    bucket: int | None = None,
    crop: bool | None = None,
    crop_stride: int | None = None,
    stride: int | None = None,
    aggregation: Aggregation | None = None,
    prefill: int | None = None,
    against: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Perplexity by length and by position; see `perplexity.prefix_curve` and `crop_control`.

    documents: how many of the longest length. crop: the control too (the default past the trained length).
    stride: instead YaRN's sliding window at each length. against: an earlier document of this kind, which the new
    one must be comparable with: "against" is then their paired difference.
    """
    only = {"bucket": bucket, "prefill": prefill, "crop": crop, "crop-stride": crop_stride, "against": against}
    _check_ppl(stride, aggregation, only)
    from . import perplexity

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
    depths: int = 5,
    trials: int = 20,
    batch_size: int = 1,
    crop: bool = True,
    generate: bool = False,
    preset: PresetName | None = None,
    haystack: str | Path | None = None,
    distractors: int = 0,
    reuse: bool | None = None,
    resume: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Retrieval of a five-digit key by length and depth; see `passkey.passkey`. haystack: a file whose text is the
    filler."""
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
    tasks: str | Sequence[str] | None = None,
    samples: int = 20,
    batch_size: int = 1,
    haystack: str | Path | None = None,
    example: bool = True,
    threshold: float | None = None,
    crop: bool = True,
    resume: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """RULER-type tasks (names, or one string with commas) and the effective length; see `ruler.run.ruler`.

    Without `lengths` what of the default lengths and tasks doesn't fit is left out, and said so.
    """
    from .ruler import run

    tasks = tasks.split(",") if isinstance(tasks, str) else tasks
    subject = load()
    asked = _lengths(subject, lengths)
    form: dict[str, Any] = {"seed": seed, "haystack": _text_of(haystack), "example": example}
    chosen = list(tasks or run.DEFAULT_TASKS)
    if lengths is None:
        wanted = [*asked, *chosen]
        asked, chosen = run.grid_that_fits(subject.tokenizer, asked, tasks, **form)
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
        threshold=run.THRESHOLD if threshold is None else threshold,
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
    length: int | None = None,
    documents: int | None = None,
    judge: Load | None = None,
    short: int | None = None,
    bucket: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Perplexity of the tokens that need the long context, and what the context gains; see `longppl.longppl`.

    length: tokens to read of each text, all by default. judge: the model that says which tokens are key, by
    default the model itself. short: tokens of the short context, by default 4,096 or half the trained length.
    """
    from . import longppl as keyed

    texts = text.load_texts(data())[:documents]
    subject = load()
    other = None if judge is None else judge()
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
