"""The report of a comparison: one HTML file that needs nothing else, from the stored documents alone."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import files, plots
from ...rope import Schedule
from ...runtimes.portability import verdicts
from .. import plots_passkey
from . import plots_schedule, summary
from .cells import CROP

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .7rem 0; } th, td { padding: .25rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #222; }
tbody tr { border-bottom: 1px solid #ddd; } .loses { color: #b3261e; } .lead { font-size: 1.05rem; }
.scroll { overflow-x: auto; } img { max-width: 100%; } pre { background: #f6f6f6; padding: .8rem; overflow: auto; }
.note { color: #555; }
"""


def _image(figure) -> str:
    with tempfile.TemporaryDirectory() as folder:
        data = plots.save(figure, Path(folder) / "figure.svg").read_bytes()
    return f'<img alt="figure" src="data:image/svg+xml;base64,{base64.b64encode(data).decode()}">'


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        marked = [
            f"<{tag}{' class=loses' if 'loses' in cell else ''}>{html.escape(cell)}</{tag}>" for cell in cells
        ]
        return f"<tr>{''.join(marked)}</tr>"

    rows = "".join(line(row, "td") for row in body)
    return f"<div class=scroll><table><thead>{line(head, 'th')}</thead><tbody>{rows}</tbody></table></div>"


def _main_table(table: Sequence[Mapping[str, Any]]) -> str:
    lengths = sorted({row["length"] for row in table})
    columns = summary.table_columns(table)
    head = ["", *(f"{name} {plots.tokens(n)}" for n in lengths for name in columns)]
    labels = dict.fromkeys(row["label"] for row in table)
    return _table(
        head, [[label, *(cell[c] for cell in summary.cells(table, label) for c in columns)] for label in labels]
    )


def page(
    table: Sequence[Mapping[str, Any]],
    ppl: summary.Documents,
    passkey: Mapping[int, summary.Documents],
    ruler: Mapping[int, summary.Documents],
    schedules: Mapping[str, Schedule],
    about: Mapping[str, Any],
    model_type: str,
) -> str:
    """The HTML of a comparison. `about`: {"model", "trained_length", "dropped", ...}, printed whole at the end."""
    trained, name = about["trained_length"], about["model"]
    body = [f"<h1>{html.escape(name)}: context extension, measured</h1>"]
    body += [f"<p class=lead>{html.escape(sentence)}</p>" for sentence in summary.headline(table)]
    if about["dropped"]:
        dropped = html.escape("; ".join(about["dropped"]))
        body.append(f"<p class=note>To fit the budget this was dropped: {dropped}.</p>")
    body.append(
        f"<p class=note>Trained on {trained:,} tokens. <b>ppl</b>: perplexity of the tokens in the position "
        "bucket that ends at the length. <b>gain</b>: nats per token over the "
        f"<b>{CROP}</b>, the unpatched model reading only its last trained-length tokens, on the same tokens; "
        "a method that loses to it has extended nothing.</p>"
    )
    body += [_main_table(table), "<h2>Perplexity by position</h2>"]
    control = ppl[CROP]["buckets"] if CROP in ppl else None
    series = {label: document["buckets"] for label, document in ppl.items() if label != CROP}
    body.append(_image(plots.bucket_curve(series, trained_length=trained, control=control)))
    if passkey:
        body.append("<h2>Passkey by length and depth</h2>")
        labels = dict.fromkeys(label for documents in passkey.values() for label in documents)
        panels = {
            label: [
                row for documents in passkey.values() if label in documents for row in documents[label]["results"]
            ]
            for label in labels
        }
        body.append(_image(plots_passkey.passkey_heatmap(panels, trained_length=trained)))
    if ruler:
        body.append("<h2>RULER-type tasks</h2>")
        first = next(iter(next(iter(ruler.values())).values()))
        tasks = [row["task"] for row in first["results"]]
        lines = [
            [
                label,
                f"{length:,}",
                *(f"{row['score']:.0%} ({row['low']:.0%}-{row['high']:.0%})" for row in d["results"]),
            ]
            for length, documents in ruler.items()
            for label, d in documents.items()
        ]
        body.append(_table(["", "tokens", *tasks], lines))
    if schedules:
        body += ["<h2>Schedules</h2>", _image(plots_schedule.schedule_plot(schedules))]
        body.append("<h2>What each runtime does with the patched folder</h2>")
        found = {label: verdicts(schedule, model_type) for label, schedule in schedules.items()}
        runtimes = [v.runtime for v in next(iter(found.values()))]
        body.append(_table(["", *runtimes], [[label, *(v.runs for v in them)] for label, them in found.items()]))
        notes = {f"{v.runtime}: {v.note}" for them in found.values() for v in them if v.note}
        body.append("<ul class=note>" + "".join(f"<li>{html.escape(n)}</li>" for n in sorted(notes)) + "</ul>")
    everything = {
        **about,
        "schedules": {label: schedule.to_dict() for label, schedule in schedules.items()},
        "cells": {label: document["settings"] for label, document in ppl.items()},
    }
    body += ["<h2>Exact settings, versions and data</h2>", f"<pre>{html.escape(files.dumps(everything))}</pre>"]
    body.append(f"<script type=application/json id=rows>{_embedded(table)}</script>")
    title = f"<title>{html.escape(name)}: context extension</title>"
    head = f"<head><meta charset=utf-8>{title}<style>{STYLE}</style></head>"
    return f"<!doctype html><html lang=en>{head}<body>{''.join(body)}</body></html>\n"


def _embedded(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as JSON that can't end its script element."""
    return files.dumps(list(table), indent=None).replace("</", "<\\/")
