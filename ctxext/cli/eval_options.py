"""Options and steps that the evaluation commands share. Thin: nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import terminal
from ..errors import UsageError
from ..folders import source
from ..plots import drawable

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
ModelDtype = Annotated[source.ModelDtype, typer.Option(help="auto: the checkpoint's own.")]
Attention = Annotated[
    str, typer.Option(help="sdpa, eager, flash_attention_2 ...; auto: sdpa where the family has it, else eager.")
]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Write the JSON document to this file.")]


def _drawable(path: Path | None) -> Path | None:
    return path if path is None else drawable(path)


Plot = Annotated[Path | None, typer.Option(help="Draw the result to this PNG or SVG.", callback=_drawable)]
Seed = Annotated[int, typer.Option(help="Draws keys, and resamples documents for intervals.")]


def parse_lengths(text: str | None) -> list[int] | None:
    """`2048,8192` or `2k,8k` as tokens; None, the evaluation's own choice, if nothing was given."""
    if text is None:
        return None
    try:
        found = [int(float(p[:-1]) * 1024) if p[-1:] in "kK" and p else int(p) for p in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--lengths {text!r} is not a list of tokens", hint="for example --lengths 2048,8192"
        ) from None
    if min(found) < 2:
        raise UsageError(f"--lengths {text!r}: a length must be at least 2 tokens")
    return sorted(set(found))


def emit(document: dict[str, Any]) -> None:
    """One JSON document on stdout, from the first process alone."""
    from .. import files

    if terminal.main_process():
        print(files.dumps(document, ascii=True))
