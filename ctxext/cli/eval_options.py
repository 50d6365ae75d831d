"""Options and steps that the evaluation commands share. Thin: nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import terminal
from ..errors import UsageError
from ..plots import drawable
from .options import method_settings

Factor = Annotated[float, typer.Option("--factor", "-f", help="Times the trained length, with --method.")]
Lengths = Annotated[
    str | None, typer.Option(help="Tokens, such as 2048,8192. Default: half the trained length up to the target.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Text file, folder, .jsonl or hf:NAME[:SPLIT[:COLUMN]] of `datasets` (repeatable). "
        "`tiny` brings a text of its own."
    ),
]
ModelDtype = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
Attention = Annotated[str, typer.Option(help="Attention implementation: sdpa, eager, flash_attention_2 ...")]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Write the JSON document to this file.")]


def _drawable(path: Path | None) -> Path | None:
    return path if path is None else drawable(path)


Plot = Annotated[Path | None, typer.Option(help="Draw the result to this PNG or SVG.", callback=_drawable)]
Crop = Annotated[bool, typer.Option("--crop/--no-crop", help="Measure the crop control too.")]
Resume = Annotated[
    Path | None, typer.Option(help="JSONL file that keeps finished cells; a stopped run goes on from it.")
]
Seed = Annotated[int, typer.Option(help="Draws keys, and resamples documents for intervals.")]


def parse_lengths(text: str | None, trained: int, target: int) -> list[int]:
    """`2048,8192` or `2k,8k` as tokens; without it half the trained length, doubling up to the target, which is
    the last. A target that isn't beyond the trained length counts as twice that."""
    if text is None:
        top, lengths = target if target > trained else 2 * trained, [trained // 2]
        while lengths[-1] * 2 < top:
            lengths.append(lengths[-1] * 2)
        return [*lengths, top]
    try:
        found = [int(float(p[:-1]) * 1024) if p[-1:] in "kK" and p else int(p) for p in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--lengths {text!r} is not a list of tokens", hint="for example --lengths 2048,8192"
        ) from None
    if min(found) < 2:
        raise UsageError(f"--lengths {text!r}: a length must be at least 2 tokens")
    return sorted(set(found))


def subject_of(model: str, method: str | None, factor: float, settings: list[str] | None, **more: Any):
    """The loaded, perhaps patched, model; see `models.load`."""
    from ..evals.models import load

    return load(model, method=method, factor=factor, params=method_settings(method, settings), **more)


def data_of(model: str, data: list[str] | None) -> list[Any]:
    """What to measure on; UsageError if nothing was given and the model brings no text."""
    if data:
        return data
    if model == "tiny":
        from ..evals.models import TINY_TEXTS

        return TINY_TEXTS
    raise UsageError("no text to measure on", hint="--data PATH, a text file or a folder of them")


def finish(document: dict[str, Any], out: Path | None, json: bool) -> None:
    """Write the document to `out` and print it with --json."""
    from .. import files

    if out:
        files.write_json(out, document)
        terminal.say(f"written to {terminal.escape(str(out))}")
    if json:
        emit(document)


def emit(document: dict[str, Any]) -> None:
    """One JSON document on stdout, from the first process alone."""
    import os

    from .. import files

    if int(os.environ.get("RANK", "0")) == 0:
        print(files.dumps(document))


def identity(subject: Any) -> str:
    """What a file of finished cells must belong to; see `Subject.identity`."""
    import json

    return json.dumps(subject.identity(), sort_keys=True)


def haystack_of(path: Path | None) -> str | None:
    """The text of a file as filler."""
    if path is None:
        return None
    from ..text import load_texts

    return "\n".join(text.text for text in load_texts(path))


def name_of(document: dict[str, Any]) -> str:
    """Model and method of a result document, for titles."""
    return document["model"] + ("" if not document["schedule"] else f" {document['schedule']['method']}")
