"""The result document and its files: what was measured, and everything needed to measure it again."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UsageError
from ..files import append_jsonl, read_jsonl


def commit() -> str | None:
    """The git commit of the ctxext sources, with "-dirty" if tracked files differ; None outside a checkout."""
    here = Path(__file__).resolve()

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *args], capture_output=True, encoding="utf-8", timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository, whose commit says nothing about this code.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def environment(model=None) -> dict[str, Any]:
    """Versions and commit, and of a live model: dtype, attention implementation, device, class."""
    answer: dict[str, Any] = {"ctxext": __version__, "commit": commit()}
    for package in ("torch", "transformers"):
        try:
            answer[package] = version(package)
        except PackageNotFoundError:
            answer[package] = None
    if model is not None:
        answer |= {
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": getattr(model.config, "_attn_implementation", None),
            "device": str(model.device.type),
            "architecture": type(model).__name__,
        }
    return answer


def result_document(
    model_name: str,
    schedule: dict | None,
    settings: dict,
    results: list[dict],
    *,
    model=None,
    data_sha256: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """{"model", "schedule", "settings", "results", ...}: the one JSON document of an evaluation.

    `schedule` is the schedule as plain data, None for an unpatched model. `settings` gets the environment and the
    hash of the data added. `more` are further top-level keys ("buckets", "documents", "control", ...).
    """
    full = {**settings, **environment(model)}
    if data_sha256 is not None:
        full["data_sha256"] = data_sha256
    return {"model": model_name, "schedule": schedule, "settings": full, "results": results, **more}


class Finished:
    """The finished cells of one measurement in a JSONL file, so that a run that was stopped goes on where it was.

    `cells`: those that the file has of these settings. Without a path nothing is kept.
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any]):
        self._path, self._of = path, json.dumps(settings, sort_keys=True, default=str)
        self.cells = [cell for cell in resume_jsonl(path) if cell["settings"] == self._of]

    def add(self, **cell: Any) -> None:
        """Keep one more."""
        if self._path is not None:
            append_jsonl(self._path, {"settings": self._of, **cell})


def resume_jsonl(path: str | Path | None) -> list[Any]:
    """The rows of a file of finished cells that is about to be continued; [] if there is none.

    A row is an object that begins with "settings", a string. A torn last line, left by a kill, is cut off the
    file, so that what is appended starts on a line of its own. Raises UsageError, and leaves the file as it is,
    if it holds anything else.
    """
    if path is None or not Path(path).is_file():
        return []
    data = Path(path).read_bytes()
    end = data.rfind(b"\n") + 1
    torn, begins = data[end:], b'{"settings": "'
    rows: list[Any] = []
    try:
        rows = read_jsonl(path)
        known = all(isinstance(row["settings"], str) for row in rows)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known or torn[: len(begins)] != begins[: len(torn)]:
        raise UsageError(
            f"{path} isn't a file of finished cells, so it can't be gone on with",
            hint="name a new file, or one that --resume wrote",
        )
    if torn:
        os.truncate(path, end)
    return rows
