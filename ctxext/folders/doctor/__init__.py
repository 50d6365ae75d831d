"""Find what is wrong with the rope of a model folder that somebody wrote, explain it, and mend it.

The checks are functions in the files of this folder. A mended folder says in every dialect what it meant to say;
nothing but JSON files is written, each with its old self beside it as NAME.before-doctor. Where a folder says two
things, what transformers runs is right: a mend must not change what the folder's users have seen.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CtxextError, UsageError
from ...files import write_text
from ..source import resolve
from . import beside, files, keys, scaling
from .check import Check, Finding
from .folder import Folder

FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json")
BACKUP = ".before-doctor"
_ROUNDS = 50


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found, what of it was mended, and what the folder still has."""

    folder: Path
    findings: list[Finding]
    mended: list[Finding]
    left: list[Finding]


def all_checks() -> dict[str, Check]:
    """Every check by name. What stops loading comes before what misleads: mends go in this order."""
    found = [c for module in (keys, scaling, files, beside) for c in vars(module).values() if isinstance(c, Check)]
    return {check.name: check for check in found}


def doctor(folder: str | os.PathLike, *, fix: bool = False, context: int | None = None) -> Diagnosis:
    """Check a model or adapter folder that anyone wrote, and with `fix` mend what can be mended.

    folder: a path, or a hub id. context: tokens that the model was trained to read, for folders that forgot to say
    (LongLoRA's --context_size). A folder without findings isn't written to.
    Raises CtxextError if its JSON can't be read at all, UsageError for a context below 2 tokens.
    """
    if context is not None and context < 2:
        raise UsageError(f"context must be at least 2 tokens, got {context}")
    if os.fspath(folder).endswith(".gguf"):
        raise CtxextError(
            f"{folder} is a GGUF file, which holds no config.json to examine",
            hint="ctxext inspect and portability read its header; ctxext patch --in-gguf writes another schedule",
        )
    path = Path(folder).expanduser()
    path = path if (path / "adapter_config.json").is_file() else resolve(folder)
    patient = Folder(path, {name: _read(path / name) for name in FILES if (path / name).is_file()}, context)
    first = _findings(patient)
    if not fix:
        return Diagnosis(path, first, [], first)
    before = copy.deepcopy(patient.files)
    mended: list[Finding] = []
    left = first
    for _ in range(_ROUNDS):
        # One at a time: a mend may settle, or bring to light, what another check looks at.
        now = next((f for f in left if f.mend), None)
        if now is None or now.mend is None:
            break
        now.mend(patient)
        mended.append(now)
        left = _findings(patient)
    for name, data in patient.files.items():
        # As text: 4 and 4.0 are equal numbers and different files.
        if json.dumps(data) != json.dumps(before.get(name)):
            _write(path / name, data)
    return Diagnosis(path, first, mended, left)


def _findings(folder: Folder) -> list[Finding]:
    return [finding for check in all_checks().values() for finding in check.findings(folder)]


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        raise CtxextError(f"{path} can't be read: {error}", hint="take this file from the base model") from error
    if not isinstance(data, dict):
        raise CtxextError(f"{path} holds no object", hint="take this file from the base model")
    return data


def _write(path: Path, data: dict[str, Any]) -> None:
    """Replace one file; a link (a hub cache is full of them) is replaced, never written through."""
    backup = path.with_name(path.name + BACKUP)
    try:
        if path.exists() and not backup.exists():
            backup.write_bytes(path.read_bytes())
        write_text(path, json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise CtxextError(f"can't write {path}: {error.strerror}", hint="mend a copy of the folder") from error
