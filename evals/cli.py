"""`ctxext eval ppl` and `ctxext eval passkey`: parse, load, measure, print, draw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import terminal
from ctxext.errors import UsageError
from ctxext.options import Existing, Json, Model, OptionalMethod, Set, TrainedLength, parse_settings

app = typer.Typer(
    help="Measure a model at long context. Every figure comes with its crop control: the unpatched model "
    "reading only its last trained-length tokens.",
    no_args_is_help=True,
)

Factor = Annotated[float, typer.Option("--factor", "-f", help="Times the trained length, with --method.")]
Lengths = Annotated[
    str | None, typer.Option(help="Tokens, such as 2048,8192. Default: half the trained length up to the target.")
]
Data = Annotated[
    list[Path] | None,
    typer.Option(help="Text file, folder or .jsonl (repeatable). `tiny` brings a text of its own."),
]
ModelDtype = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
Attention = Annotated[str, typer.Option(help="Attention implementation: sdpa, eager, flash_attention_2 ...")]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Write the JSON document to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the result to this PNG or SVG.")]
Crop = Annotated[bool, typer.Option("--crop/--no-crop", help="Measure the crop control too.")]
Seed = Annotated[int, typer.Option(help="Draws keys, and resamples documents for intervals.")]


def parse_lengths(text: str | None, trained: int, target: int) -> list[int]:
    """`2048,8192` or `2k,8k` as tokens; without it half the trained length, doubling up to twice or the target."""
    if text is None:
        top, lengths = max(target, 2 * trained), [trained // 2]
        while lengths[-1] * 2 <= top:
            lengths.append(lengths[-1] * 2)
        return lengths
    try:
        found = [int(float(p[:-1]) * 1024) if p[-1:] in "kK" and p else int(p) for p in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--lengths {text!r} is not a list of tokens", hint="for example --lengths 2048,8192"
        ) from None
    if min(found) < 2:
        raise UsageError(f"--lengths {text!r}: a length must be at least 2 tokens")
    return sorted(set(found))


def _subject(model: str, method: str | None, factor: float, settings: list[str] | None, **more: Any):
    from .models import load

    if method is None and settings:
        raise UsageError("--set needs --method")
    return load(model, method=method, factor=factor, params=parse_settings(settings), **more)


def _data(model: str, data: list[Path] | None) -> list[Path]:
    if data:
        return data
    if model == "tiny":
        from .models import TINY_TEXTS

        return TINY_TEXTS
    raise UsageError("no text to measure on", hint="--data PATH, a text file or a folder of them")


def _finish(document: dict[str, Any], out: Path | None, json: bool) -> None:
    from . import results

    if out:
        results.write_json(out, document)
        terminal.say(f"written to {out}")
    if json:
        print(results.dumps(document))


@app.command()
def ppl(
    model: Model,
    data: Data = None,
    lengths: Lengths = None,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
    documents: Annotated[int, typer.Option(help="How many documents of the longest length.", min=1)] = 1,
    bucket: Annotated[int | None, typer.Option(help="Tokens per position bucket; default an eighth.")] = None,
    crop: Crop = True,
    crop_stride: Annotated[
        int | None, typer.Option(help="Tokens scored per control window; default L/16.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Instead: YaRN's sliding window, this many tokens apart, at each length.")
    ] = None,
    aggregation: Annotated[
        str, typer.Option(help="With --stride: token (weighted) or window (as YaRN).")
    ] = "window",
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
    from . import perplexity, plots, results, text

    chosen = _data(model, data)
    more = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
    subject = _subject(model, method, factor, settings, **more)
    asked = parse_lengths(lengths, subject.trained_length, subject.schedule.max_length)
    bos = text.bos_id(subject.tokenizer)
    if stride is not None:
        found = text.documents(chosen, subject.tokenizer, max(asked), documents, whole=True)
        rows = [
            perplexity.sliding_window(subject.model, found.ids, n, stride, bos=bos, aggregation=aggregation)
            for n in asked
        ]
        rows = [{"length": n, **row} for n, row in zip(asked, rows, strict=True)]
        measured: dict[str, Any] = {"rows": rows, "settings": {"measure": "sliding window", "stride": stride}}
    else:
        found = text.documents(chosen, subject.tokenizer, max(asked), documents)
        common = {"bucket": bucket, "bos": bos, "seed": seed}
        curve = perplexity.prefix_curve(subject.model, found.ids, asked, **common)
        measured = {k: getattr(curve, k) for k in ("rows", "buckets", "settings")}
        measured["per_document"] = curve.documents
        if crop and max(asked) > subject.trained_length:
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
    if not json:
        _print_ppl(document)
    if plot:
        _plot_ppl(document, plot, plots)
    _finish(document, out, json)


def _print_ppl(document: dict[str, Any]) -> None:
    name = document["model"] + ("" if not document["schedule"] else f" {document['schedule']['method']}")
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
    from . import passkey as measure
    from . import plots, results

    more = {"dtype": dtype, "attention": attention, "trained_length": trained_length, "existing": existing}
    subject = _subject(model, method, factor, settings, **more)
    asked = parse_lengths(lengths, subject.trained_length, subject.schedule.max_length)
    places = [i / (depths - 1) for i in range(depths)] if depths > 1 else [0.5]
    common = {"depths": places, "trials": trials, "seed": seed, "batch_size": batch_size}
    result = measure.passkey(subject.model, subject.tokenizer, asked, generate=generate, **common)
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
    if plot:
        label = subject.schedule.method if document["schedule"] else "unpatched"
        panels = {label: result.rows} | (
            {"crop control": further["control"]["rows"]} if "control" in further else {}
        )
        figure = plots.passkey_heatmap(panels, trained_length=subject.trained_length, title=subject.name)
        plots.save(figure, plot)
    _finish(document, out, json)


def _print_passkey(document: dict[str, Any]) -> None:
    name = document["model"] + ("" if not document["schedule"] else f" {document['schedule']['method']}")
    control = document.get("control", {}).get("lengths")
    places = document["settings"]["depths"]
    table = []
    for i, row in enumerate(document["lengths"]):
        cells = [r for r in document["results"] if r["length"] == row["length"]]
        line = [f"{row['length']:,}", f"{row['correct']}/{row['trials']}", f"{row['accuracy']:.0%}"]
        line += [f"{row['low']:.0%}-{row['high']:.0%}"]
        line += [f"{control[i]['accuracy']:.0%}"] if control else []
        table.append(line + [f"{cell['accuracy']:.0%}" for cell in cells])
    columns = ["tokens", "correct", "accuracy", "95 %"] + (["crop"] if control else [])
    terminal.print_table(f"{name}: passkey", [*columns, *(f"at {p:.0%}" for p in places)], table)
