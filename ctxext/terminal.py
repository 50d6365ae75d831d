"""What a person sees: remarks and progress on stderr, tables and JSON on stdout, from one process of several."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .errors import CtxextError

T = TypeVar("T")
verbose = False


def process_number() -> int:
    """Which of the processes that a launcher started this is, from 0 (torchrun and accelerate set RANK)."""
    return int(os.environ.get("RANK", "0"))


def main_process() -> bool:
    """Whether this is the only process, or the one of several that speaks."""
    return process_number() == 0


def processes() -> int:
    """How many processes a launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def print_anything() -> None:
    """Let stdout and stderr show in any locale what they can't encode, instead of ending the work."""
    codecs.register_error("ctxext", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ctxext")


def _escaped(error: UnicodeError) -> tuple[bytes, int]:
    """File names as their bytes, other text with backslashes."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    parts = (os.fsencode(c) if "\udc80" <= c <= "\udcff" else c.encode("ascii", "backslashreplace") for c in found)
    return b"".join(parts), error.end


def console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, soft_wrap=True, quiet=not main_process())


def say(text: str) -> None:
    """A remark for the person watching, on stderr, in rich's markup: `escape` what isn't ours."""
    console(stderr=True).print(text)


def run(main: Callable[..., None]) -> None:
    """`typer.run` for a module run by `python -m`: the project's errors are told as its command tells them."""
    import typer

    try:
        typer.run(main)
    except (CtxextError, OSError) as error:
        raise SystemExit(say_error(error)) from None


def progress(iterable: Iterable[T], description: str, *, total: int | None = None) -> Iterator[T]:
    """Iterate with a bar and an estimate on stderr if that is a terminal, silently otherwise.

    stdout is left alone: with `--json` it carries the result.
    """
    if not sys.stderr.isatty():
        yield from iterable
        return
    from rich.progress import track

    yield from track(iterable, description=description, total=total, console=Console(stderr=True), transient=True)


def say_error(error: CtxextError | OSError) -> int:
    """An error and its fix, on stderr. Returns the exit code."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        error = CtxextError(
            f"{where}{error.strerror or error}",
            hint="look whether the place is there, can be written and has room",
        )
    out = console(stderr=True)
    out.print("[bold red]error:[/] ", end="")
    out.print(error.message, markup=False)
    if error.hint:
        out.print("  [bold]fix:[/] ", end="")
        out.print(error.hint, markup=False)
    return error.exit_code


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    if main_process():
        print(json.dumps(data, indent=1, allow_nan=False))


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], *, left: int = 1) -> None:
    """A table on stdout; the first `left` columns are text, the others numbers."""
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    out = Console(highlight=False, quiet=not main_process())
    if not out.is_terminal:
        # Off a terminal rich would fold everything into 80 columns.
        out = Console(highlight=False, quiet=not main_process(), width=200)
    out.print(table)
