"""The report of a comparison: one HTML file that needs nothing else, from the stored documents alone."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import files, plots
from ...rope import Schedule
from ...runtimes.portability import verdicts
from ..plots import bucket_curve, passkey_heatmap, schedule_plot
from . import summary
from .cells import CROP

TEMPLATE = Path(__file__).with_name("report.html.j2")
Grid = tuple[list[str], list[list[str]]]
"""The head and the lines of a table."""


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
    import jinja2

    trained = about["trained_length"]
    series = {label: document["buckets"] for label, document in ppl.items() if label != CROP}
    control = ppl[CROP]["buckets"] if CROP in ppl else None
    panels: dict[str, list[dict]] = {}
    for documents in passkey.values():
        for label, document in documents.items():
            panels.setdefault(label, []).extend(document["results"])
    found = {label: verdicts(schedule, model_type) for label, schedule in schedules.items()}
    everything = {
        **about,
        "schedules": {label: schedule.to_dict() for label, schedule in schedules.items()},
        "cells": {label: document["settings"] for label, document in ppl.items()},
    }
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    template = jinja2.Environment(**options, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        about=about,
        headline=summary.headline(table),
        crop=CROP,
        main=summary.grid(table),
        curves=_svg(bucket_curve(series, trained_length=trained, control=control)),
        heatmap=_svg(passkey_heatmap(panels, trained_length=trained)) if panels else None,
        ruler=_ruler(ruler) if ruler else None,
        frequencies=_svg(schedule_plot(schedules)) if schedules else None,
        runtimes=(
            ["", *(v.runtime for v in next(iter(found.values()), []))],
            [[label, *(v.runs for v in them)] for label, them in found.items()],
        ),
        notes=sorted({f"{v.runtime}: {v.note}" for them in found.values() for v in them if v.note}),
        everything=files.dumps(everything),
        # Nothing in it may end its script element.
        rows=files.dumps(list(table), indent=None).replace("</", "<\\/"),
    )


def _svg(figure: Any) -> str:
    """A figure as the base64 of its SVG."""
    with tempfile.TemporaryDirectory() as folder:
        return base64.b64encode(plots.save(figure, Path(folder) / "figure.svg").read_bytes()).decode()


def _ruler(ruler: Mapping[int, summary.Documents]) -> Grid:
    first = next(iter(next(iter(ruler.values())).values()))
    return ["", "tokens", *(row["task"] for row in first["results"])], [
        [
            label,
            f"{length:,}",
            *(f"{r['score']:.0%} ({r['low']:.0%}-{r['high']:.0%})" for r in document["results"]),
        ]
        for length, documents in ruler.items()
        for label, document in documents.items()
    ]
