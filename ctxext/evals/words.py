"""Words for synthetic tasks, drawn by hash from the texts inside the package: no download, no extra dependency.

RULER takes its words from the package wonderwords; here they are the plain words of the embedded text, so a task
needs nothing from outside and is the same on every machine.
"""

from __future__ import annotations

import re
from functools import cache

from ..folders.source import TINY
from ..needles.prompts import hashed


@cache
def embedded_text() -> str:
    """All texts that come inside the package, in order of their names: some 470,000 characters."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((TINY.parent / "text").glob("*.txt")))


@cache
def words() -> tuple[str, ...]:
    """All lower-case words of 4 to 10 letters of the embedded texts, sorted: some 3,000."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,10}\b", embedded_text()))))


def word(*cell: object) -> str:
    """One word from a hash of `cell`."""
    found = words()
    return found[hashed("word", *cell) % len(found)]
