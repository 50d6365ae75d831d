"""Find what is wrong with the rope of a model folder that somebody wrote, explain it, and mend it.

The checks are functions in the files of this folder. A mended folder says in every dialect what it meant to say;
nothing but JSON files is written, each with its old self beside it as NAME.before-doctor. Where a folder says two
things, what transformers runs is right: a mend must not change what the folder's users have seen.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CtxextError, UsageError
from ...files import write_text
from ..source import resolve

FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json")
BACKUP = ".before-doctor"
_ROUNDS = 50


@dataclass
class Folder:
    """The JSON files of a model folder, as they are being mended.

    context: tokens that it was trained to read, if the user said so.
    """

    path: Path
    files: dict[str, dict[str, Any]]
    context: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        """config.json; empty if there is none."""
        return self.files.get("config.json", {})

    @property
    def tokenizer(self) -> dict[str, Any]:
        """tokenizer_config.json; empty if there is none."""
        return self.files.get("tokenizer_config.json", {})

    @property
    def scaling(self) -> dict[str, Any]:
        """The dict of scaling that transformers reads: rope_scaling if it is there, else rope_parameters."""
        found = self.config.get("rope_scaling") or self.config.get("rope_parameters")
        return found if isinstance(found, dict) else {}

    @property
    def kind(self) -> str:
        """Its type of scaling, "default" if none."""
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))

    def has(self, name: str) -> bool:
        """Whether the folder holds this file."""
        return (self.path / name).is_file()


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. level: "error" (wrong text or no loading) or "warning" (some runtime is misled)."""

    check: str
    level: str
    where: str
    what: str
    fix: str
    report: str
    mend: Callable[[Folder], None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        keys = ("check", "level", "where", "what", "fix", "report")
        return {key: getattr(self, key) for key in keys} | {"mendable": self.mend is not None}


@dataclass(frozen=True)
class Diagnosis:
    """What `examine` found, what of it was mended, and what the folder still has."""

    folder: Path
    findings: list[Finding]
    mended: list[Finding]
    left: list[Finding]


Check = Callable[[Folder], Iterator[tuple]]
_CHECKS: dict[str, tuple[Check, str, str]] = {}


def check(level: str, report: str):
    """Register a check; its name is the function's.

    The function yields (where, what, fix, mend) per finding; mend changes the Folder's files and is None if only a
    person can choose. report: the threads that tell of it.
    """

    def register(function: Check) -> Check:
        _CHECKS[function.__name__] = (function, level, report)
        return function

    return register


def all_checks() -> dict[str, tuple[Check, str, str]]:
    """Every check by name: (function, level, report)."""
    # In this order: what stops loading comes before what misleads.
    from . import writing  # noqa: F401, I001
    from . import meaning  # noqa: F401
    from . import whole  # noqa: F401

    return dict(_CHECKS)


def findings(folder: Folder) -> list[Finding]:
    """Everything that the checks find in a folder as it is now."""
    found = []
    for name, (function, level, report) in all_checks().items():
        try:
            for where, what, fix, mend in function(folder):
                found.append(Finding(name, level, where, what, fix, report, mend))
        except (CtxextError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A config that stops our own reader, or a value of the wrong kind, stops the check, not the others.
            ours = isinstance(error, CtxextError)
            what = error.message if ours else f"a value of the wrong kind stops this check: {error}"
            hint = (error.hint if ours else None) or "take the config from the base model"
            found.append(Finding(name, "error", "config.json", what, hint, report))
    return found


def examine(model: str | os.PathLike, *, fix: bool = False, context: int | None = None) -> Diagnosis:
    """Check a model or adapter folder, and with `fix` mend what can be mended.

    context: tokens that the model was trained to read, for folders that forgot to say (LongLoRA's --context_size).
    A folder without findings isn't written to. Raises CtxextError if its JSON can't be read at all.
    """
    if context is not None and context < 2:
        raise UsageError(f"context must be at least 2 tokens, got {context}")
    if os.fspath(model).endswith(".gguf"):
        raise CtxextError(
            f"{model} is a GGUF file, which holds no config.json to examine",
            hint="ctxext inspect and portability read its header; ctxext patch --in-gguf writes another schedule",
        )
    path = (
        Path(model).expanduser()
        if (Path(model).expanduser() / "adapter_config.json").is_file()
        else resolve(model)
    )
    folder = Folder(path, {name: _read(path / name) for name in FILES if (path / name).is_file()}, context)
    first = findings(folder)
    if not fix:
        return Diagnosis(path, first, [], first)
    before = copy.deepcopy(folder.files)
    mended: list[Finding] = []
    left = first
    for _ in range(_ROUNDS):
        # One at a time: a mend may settle, or bring to light, what another check looks at.
        now = next((f for f in left if f.mend), None)
        if now is None:
            break
        now.mend(folder)
        mended.append(now)
        left = findings(folder)
    for name, data in folder.files.items():
        # As text: 4 and 4.0 are equal numbers and different files.
        if json.dumps(data) != json.dumps(before.get(name)):
            _write(path / name, data)
    return Diagnosis(path, first, mended, left)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
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
