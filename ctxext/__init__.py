"""Extend the context of pretrained Hugging Face models, and measure honestly whether it worked.

The names below are imported on first use, so that `import ctxext` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._version import __version__

_HOME = {
    "patch": "live.patch",
    "unpatch": "live.patch",
    "apply": "live.patch",
    "schedule_of": "live.patch",
    "load": "folders.load",
    "patch_checkpoint": "folders.patch",
    "merge": "folders.merge",
    "Rope": "rope",
    "Schedule": "rope",
    "CtxextError": "errors",
    "UsageError": "errors",
    "CtxextWarning": "errors",
}
__all__ = ["__version__", "methods", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "methods":
        return importlib.import_module(".methods", __name__)
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'ctxext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
