"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import CtxextError
from .folder import Folder, Mend

Level = Literal["error", "warning"]
Found = Iterator[tuple[str, str, str, Mend | None]]
"""(where, what, fix, mend) per finding; a mend changes the Folder's files, None: only a person can choose."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. level: "error" (wrong text or no loading) or "warning" (some runtime is misled)."""

    check: str
    level: Level
    where: str
    what: str
    fix: str
    report: str
    mend: Mend | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        keys = ("check", "level", "where", "what", "fix", "report")
        return {key: getattr(self, key) for key in keys} | {"mendable": self.mend is not None}


@dataclass(frozen=True)
class Check:
    """One thing to look for. report: the threads that tell of it."""

    level: Level
    report: str
    look: Callable[[Folder], Found]

    @property
    def name(self) -> str:
        return self.look.__name__

    def findings(self, folder: Folder) -> Iterator[Finding]:
        """What it finds in a folder as it is now."""
        try:
            for where, what, fix, mend in self.look(folder):
                yield Finding(self.name, self.level, where, what, fix, self.report, mend)
        except (CtxextError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A config that stops our own reader, or a value of the wrong kind, stops the check, not the others.
            what, hint = f"a value of the wrong kind stops this check: {error}", None
            if isinstance(error, CtxextError):
                what, hint = error.message, error.hint
            hint = hint or "take the config from the base model"
            yield Finding(self.name, "error", "config.json", what, hint, self.report)


def check(level: Level, report: str) -> Callable[[Callable[[Folder], Found]], Check]:
    """Make a function a Check of its name."""
    return lambda look: Check(level, report, look)
