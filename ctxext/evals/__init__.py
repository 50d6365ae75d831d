"""Evaluators: perplexity by length and position, passkey retrieval, their statistics, files and plots.

Importable as `ctxext.evals`. Nothing heavy is imported here; take what you need from the submodules
(`ctxext.evals.perplexity`, `ctxext.evals.passkey`, ...). They import `ctxext`, never the other way round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(iterable: Iterable[T], description: str, *, total: int | None = None) -> Iterator[T]:
    """Iterate with a bar and an estimate on stderr if that is a terminal, silently otherwise.

    stdout is left alone: with `--json` it carries the result.
    """
    if not sys.stderr.isatty():
        yield from iterable
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(iterable, description=description, total=total, console=Console(stderr=True), transient=True)
