"""`ctxext eval`: parse, load, measure, print, draw. The other commands of the group are in `cli_tasks.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import terminal
from ..errors import UsageError
from . import evaluate_tasks as cli_tasks
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
    data_of,
    finish,
    haystack_of,
    identity,
    name_of,
    parse_lengths,
    subject_of,
)
from .options import Existing, Json, Model, OptionalMethod, Set, TrainedLength

app = typer.Typer(
    help="Measure a model at long context. Every figure comes with its crop control: the unpatched model "
    "reading only its last trained-length tokens.",
    no_args_is_help=True,
)
app.command("longppl")(cli_tasks.longppl)
app.command("ruler")(cli_tasks.ruler)
app.command("lm-eval")(cli_tasks.lm_eval)


@app.command()
def ppl(
    model: Model,
    data: Data = None,
    lengths: Lengths = None,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
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
        str | None, typer.Option(help="With --stride: token (weighted) or window (as YaRN, the default).")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Read texts so many tokens at a time, if activations don't fit.", min=1)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier --out: also print the paired difference to it.")
    ] = None,
    dtype: ModelDtype = "auto",
    attention: Attention = "sdpa",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Perplexity by length and by position, from one prefill per document."""
    only = {"bucket": bucket, "prefill": prefill, "crop": crop, "crop-stride": crop_stride, "against": against}
    _check_ppl(stride, aggregation, only)
    from .. import files, plots, text
    from ..evals import perplexity, results
    from ..evals.compare import pairs as pairing

    baseline = pairing.read_baseline(against) if against else None
    chosen = data_of(model, data)
    more = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
    subject = subject_of(model, method, factor, settings, **more)
    asked = parse_lengths(lengths, subject.trained_length, subject.schedule.max_length)
    bos = text.bos_id(subject.tokenizer)
    if stride is not None:
        found = text.documents(chosen, subject.tokenizer, max(asked), documents, whole=True)
        common = {"bos": bos, "aggregation": aggregation or "window"}
        rows = [perplexity.sliding_window(subject.model, found.ids, n, stride, **common) for n in asked]
        rows = [{"length": n, **row} for n, row in zip(asked, rows, strict=True)]
        measured: dict[str, Any] = {"rows": rows, "settings": {"measure": "sliding window", "stride": stride}}
    else:
        found = text.documents(chosen, subject.tokenizer, max(asked), documents)
        controlled = crop is not False and max(asked) > subject.trained_length
        if controlled and crop_stride is not None:
            perplexity.check_crop(subject.trained_length, crop_stride, bos)
        if baseline:
            same = {"data_sha256": found.sha256, "documents": found.names, "lengths": asked, "bucket": bucket}
            pairing.check(baseline, **same)
        common = {"bucket": bucket, "bos": bos, "seed": seed}
        curve = perplexity.prefix_curve(subject.model, found.ids, asked, prefill=prefill, **common)
        measured = {k: getattr(curve, k) for k in ("rows", "buckets", "settings")}
        measured["per_document"] = curve.documents
        if controlled:
            with subject.as_trained():
                control = perplexity.crop_control(
                    subject.model, found.ids, asked, subject.trained_length, stride=crop_stride, **common
                )
            measured["control"] = {"rows": control.rows, "buckets": control.buckets}
    document = results.result_document(
        subject.name,
        subject.description(),
        measured["settings"] | {"trained_length": subject.trained_length},
        measured["rows"],
        model=subject.model,
        data_sha256=found.sha256,
        documents=found.names,
        **{k: measured[k] for k in ("buckets", "control", "per_document") if k in measured},
    )
    if baseline:
        if out:
            files.write_json(out, document)
        document["against"] = pairing.paired(document, baseline, seed=seed)
    if not json:
        _print_ppl(document)
    finish(document, out, json)
    if plot:
        _plot_ppl(document, plot, plots)


def _check_ppl(stride: int | None, aggregation: str | None, only: dict[str, Any]) -> None:
    """Raise UsageError for options of `ppl` that can't go together. only: those of the measurement without
    --stride, None where not given."""
    given = [name for name, value in only.items() if value is not None and value is not False]
    if stride is not None and given:
        raise UsageError(f"--stride has no --{given[0]}", hint="measure by prefix, without --stride")
    if aggregation is not None:
        from ..evals.sliding import AGGREGATIONS

        if stride is None:
            raise UsageError("--aggregation needs --stride")
        if aggregation not in AGGREGATIONS:
            raise UsageError(f"--aggregation {aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
    if only["crop"] is False and only["crop-stride"] is not None:
        raise UsageError("--crop-stride needs --crop")


def _print_ppl(document: dict[str, Any]) -> None:
    name = name_of(document)
    control = document.get("control", {})
    parts = [("perplexity by length", document["results"], control.get("rows"), lambda r: f"{r['length']:,}")]
    if "buckets" in document:
        place = lambda r: f"{r['start']:,}-{r['end']:,}"  # noqa: E731
        parts.append(("perplexity by position", document["buckets"], control.get("buckets"), place))
    for title, rows, against, place in parts:
        table = []
        for i, row in enumerate(rows):
            interval = f"{row['low']:.2f}-{row['high']:.2f}" if row.get("low") is not None else ""
            cells = [place(row), f"{row['tokens']:,}", f"{row['ppl']:.3f}", interval]
            if against:
                cells += [f"{against[i]['ppl']:.3f}", _verdict(row["ppl"], against[i]["ppl"])]
            table.append(cells)
        columns = ["tokens in context" if "length" in title else "position", "scored", "ppl", "95 %"]
        terminal.print_table(f"{name}: {title}", columns + (["crop", "against crop"] if against else []), table)

    other = terminal.escape(document.get("against", {}).get("model", ""))
    for row in document.get("against", {}).get("buckets", []):
        interval = "" if row["low"] is None else f" ({row['low']:+.4f} to {row['high']:+.4f})"
        place = f"{row['start']:,}-{row['end']:,}"
        terminal.say(f"{place} against {other}: {row['difference']:+.4f} nats{interval}")


def _verdict(ppl_value: float, control: float) -> str:
    """Relative difference to the control; below half a per mille they are the same text read the same way."""
    change = ppl_value / control - 1
    return "=" if abs(change) < 5e-4 else f"{change:+.1%}" + (" loses" if change > 0 else "")


def _plot_ppl(document: dict[str, Any], path: Path, plots: Any) -> None:
    label = document["schedule"]["method"] if document["schedule"] else "unpatched"
    key = "buckets" if "buckets" in document else "results"
    draw = plots.bucket_curve if key == "buckets" else plots.ppl_curve
    control = document.get("control", {}).get("buckets")
    trained = document["settings"]["trained_length"]
    figure = draw({label: document[key]}, trained_length=trained, control=control, title=document["model"])
    plots.save(figure, path)


@app.command()
def passkey(
    model: Model,
    lengths: Lengths = None,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
    depths: Annotated[int, typer.Option(help="Depths from 0 (start) to 1 (end).", min=1)] = 5,
    trials: Annotated[int, typer.Option(help="Keys per length and depth.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Prompts per forward.", min=1)] = 1,
    crop: Crop = True,
    generate: Annotated[
        bool, typer.Option("--generate", help="Score by greedy generation (slower, equal).")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(help="A published form: landmark, yarn, pose, longlora or ruler.")
    ] = None,
    haystack: Annotated[Path | None, typer.Option(help="Text file or folder to use as filler.")] = None,
    distractors: Annotated[int, typer.Option(help="Other keys in each prompt.", min=0)] = 0,
    reuse: Annotated[
        bool | None, typer.Option("--reuse/--no-reuse", help="Share prefills; by default where it is exact.")
    ] = None,
    resume: Resume = None,
    dtype: ModelDtype = "auto",
    attention: Attention = "sdpa",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Retrieval of a five-digit key by length and depth, at exact lengths."""
    from .. import plots
    from ..evals import passkey as measure
    from ..evals import plots_passkey, results

    more = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
    subject = subject_of(model, method, factor, settings, **more)
    asked = parse_lengths(lengths, subject.trained_length, subject.schedule.max_length)
    places = [i / (depths - 1) for i in range(depths)] if depths > 1 else [0.5]
    common = {"depths": places, "trials": trials, "seed": seed, "batch_size": batch_size}
    common |= {"preset": preset, "haystack": haystack_of(haystack), "distractors": distractors}
    common |= {"resume": resume, "identity": identity(subject)}
    result = measure.passkey(subject.model, subject.tokenizer, asked, generate=generate, reuse=reuse, **common)
    further: dict[str, Any] = {"lengths": result.lengths}
    if crop and max(asked) > subject.trained_length:
        with subject.as_trained():
            control = measure.passkey(
                subject.model, subject.tokenizer, asked, crop=subject.trained_length, **common
            )
        further["control"] = {"rows": control.rows, "lengths": control.lengths}
    document = results.result_document(
        subject.name,
        subject.description(),
        result.settings | {"trained_length": subject.trained_length},
        result.rows,
        model=subject.model,
        **further,
    )
    if not json:
        _print_passkey(document)
    finish(document, out, json)
    if plot:
        label = subject.schedule.method if document["schedule"] else "unpatched"
        panels = {label: result.rows} | (
            {"crop control": further["control"]["rows"]} if "control" in further else {}
        )
        figure = plots_passkey.passkey_heatmap(panels, trained_length=subject.trained_length, title=subject.name)
        plots.save(figure, plot)


def _print_passkey(document: dict[str, Any]) -> None:
    name = name_of(document)
    control = document.get("control", {}).get("lengths")
    places = document["settings"]["depths"]
    table = []
    for i, row in enumerate(document["lengths"]):
        cells = [r for r in document["results"] if r["length"] == row["length"]]
        line = [f"{row['length']:,}", f"{row['correct']}/{row['trials']}", f"{row['accuracy']:.1%}"]
        line += [f"{row['low']:.0%}-{row['high']:.0%}"]
        line += [f"{control[i]['accuracy']:.0%}"] if control else []
        table.append(line + [f"{cell['accuracy']:.0%}" for cell in cells])
    columns = ["tokens", "correct", "accuracy", "95 %"] + (["crop"] if control else [])
    terminal.print_table(f"{name}: passkey", [*columns, *(f"at {p:.0%}" for p in places)], table)
