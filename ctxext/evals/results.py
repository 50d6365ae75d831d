"""The result document and its files: what was measured, and everything needed to measure it again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import CtxextError, UsageError


def commit() -> str | None:
    """The git commit of the ctxext sources, with "-dirty" if tracked files differ; None outside a checkout."""
    here = Path(__file__).resolve()

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *args], capture_output=True, text=True, timeout=10, check=True
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


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def dumps(document: Any, *, indent: int | None = 2) -> str:
    """Strict JSON: keys in their order, non-finite numbers as null."""
    return json.dumps(_plain(document), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: str | Path, document: Any) -> Path:
    """Write a JSON file atomically: a kill leaves the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(document) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # mkstemp files are private; give what the user's umask would have given.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def append_jsonl(path: str | Path, row: Any) -> None:
    """Append one row as one line, in a single write, so that a kill can't interleave rows."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = dumps(row, indent=None) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a result document; CtxextError says which file and line is broken."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CtxextError(f"{path} doesn't exist") from error
    except ValueError as error:
        raise CtxextError(f"{path} isn't a JSON document: {error}") from error


def read_jsonl(path: str | Path) -> list[Any]:
    """The rows of a JSONL file. A last line without its end, left by a kill, is dropped."""
    lines = Path(path).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]


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
