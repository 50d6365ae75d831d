"""The search's log, JSON lines, which is its checkpoint too.

The first line holds the settings, every other one the evaluation of one candidate, in order. A strategy depends on
nothing but its seed and the values that it was told. So a search that was killed goes on by running again from the
start, taking the values from the log until it ends: the same trace as that of an uninterrupted run, at no cost in
model tokens, and without any state of the strategy on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CtxextError, UsageError
from ..files import append_jsonl


class Log:
    """Lines to replay, then lines to write. path: None keeps nothing.

    header: the first line, if it isn't written yet. It is with the first evaluation, so that a search that can't
    begin leaves nothing.
    """

    def __init__(
        self,
        path: Path | None,
        records: list[dict[str, Any]] | None = None,
        header: Mapping[str, Any] | None = None,
    ):
        self.path = path
        self.header = header
        self._old = records or []
        self._next = 0

    @classmethod
    def begin(cls, path: Path, settings: Mapping[str, Any], *, resume: bool) -> Log:
        """Start a log, or go on with one. Call it in one process only.

        Raises UsageError if there is a log already without `resume`, none with it, or one of another search.
        """
        settings = json.loads(json.dumps(settings))
        if not resume:
            if path.exists():
                raise UsageError(
                    f"{path} is the log of a search that didn't end",
                    hint="add --resume to go on with it, or delete it",
                )
            return cls(path, header={"settings": settings})
        if not path.is_file():
            raise UsageError(f"there is no search to go on with: no {path}", hint="leave out --resume")
        lines = _whole_lines(path)
        begun = lines[0].get("settings") if lines else None
        if begun is None:
            raise CtxextError(f"{path} is not the log of a search", hint="delete it and begin anew")
        changed = sorted(k for k in {*begun, *settings} if begun.get(k) != settings.get(k))
        if changed:
            raise UsageError(
                f"{path} was begun with another {', '.join(changed)}",
                hint="give back the old values, or delete it and begin anew",
            )
        return cls(path, lines[1:])

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines that are still to be replayed."""
        return self._old[self._next :]

    def replay(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The logged line for what a strategy asks for now, or None at the end of the log.

        Raises CtxextError if the log has something else here: it was written by another version of the code.
        """
        if self._next >= len(self._old):
            return None
        found = self._old[self._next]
        if any(found.get(k) != v for k, v in asked.items()):
            raise CtxextError(
                f"line {self._next + 2} of {self.path} is not what this search asks for there",
                hint="it was begun by another version of ctxext or its libraries: delete it and begin anew",
            )
        self._next += 1
        return found

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; after a kill it is there whole or not at all."""
        if self.path is None:
            return
        json.dumps(record, allow_nan=False)  # raises: what is no number would be written as null
        if self.header is not None:
            append_jsonl(self.path, self.header)
            self.header = None
        append_jsonl(self.path, record)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a kill cut short is removed from the file."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
            os.fsync(file.fileno())
    try:
        return [json.loads(line) for line in whole.decode().splitlines()]
    except ValueError as error:
        raise CtxextError(f"{path} is damaged: {error}", hint="delete it and begin anew") from error
