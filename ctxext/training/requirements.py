"""The packages that training needs beside the core's, looked for before anything slow is imported."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import CtxextError


def require() -> None:
    """Raise CtxextError if accelerate, peft or datasets isn't installed."""
    missing = [name for name in ("accelerate", "datasets", "peft") if find_spec(name) is None]
    if missing:
        raise CtxextError(f"training needs {' and '.join(missing)}", hint="pip install 'ctxext[train]'")
