"""`name=value` strings of a command line as options of a method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UsageError


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """`name=value` strings as a dict; values are JSON where they parse as JSON, `@file` reads a JSON file.

    Raises UsageError for a setting without `=`, given twice, or whose file can't be read.
    """
    values: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"--set {setting!r} is not NAME=VALUE", hint="for example --set beta_fast=16")
        if name in values:
            raise UsageError(f"--set {name} is given twice")
        values[name] = _file_value(text[1:]) if text.startswith("@") else _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _file_value(path: str) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UsageError(f"can't read a JSON value from {path}: {error}") from error
