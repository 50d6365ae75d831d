"""What a command would do with a MODEL, read without converting or writing anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import methods
from ..errors import CtxextError, UsageError
from ..files import check_overwrite
from ..rope import Schedule
from .patch import check_target, plan, plan_config, read_config
from .source import DTYPES, resolve


def is_gguf(model: str | os.PathLike) -> bool:
    """Whether MODEL names a GGUF file."""
    return os.fspath(model).endswith(".gguf")


def peek(model: str | os.PathLike) -> dict[str, Any]:
    """The config.json of MODEL; of a .gguf what its header says of the rope, its weights left alone."""
    if not is_gguf(model):
        return read_config(resolve(model))
    from ..runtimes.gguf_rope import gguf_config

    path = Path(model).expanduser()
    if not path.is_file():
        raise CtxextError(f"there is no file {path}")
    return gguf_config(path)


def preview(
    model: str | os.PathLike, method: str, factor: float, *, dtype: str = "bfloat16", **options: Any
) -> tuple[Schedule, dict[str, Any]]:
    """The schedule and config.json that `checkpoint.patch_checkpoint` would write. options, errors: of `plan`."""
    if not is_gguf(model):
        return plan(model, method, factor, dtype=dtype, **options)[1:]
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    methods.check_factor(factor)
    return plan_config(peek(model), method, factor, **options)


def check_out(model: str | os.PathLike, out: Path, force: bool) -> None:
    """Raise CtxextError if a patched copy of MODEL can't be written to `out`."""
    if is_gguf(model):
        check_overwrite(Path(os.path.abspath(out.expanduser())), force)
    else:
        check_target(resolve(model), out, force)
