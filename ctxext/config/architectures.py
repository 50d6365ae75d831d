"""The guard of folders that only `ctxext.load` runs: what a runtime looks at first, and can't make sense of.

transformers stops at the rope type. Others never look at it: mistral.rs on Qwen, and many on the families to whose
rope they pass no scaling. They choose a class by the name in `architectures`, or read the theta at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "Ctxext"
"""Before the name of a model class, in `architectures` of a guarded folder."""
_THETAS = ("rope_theta", "rotary_emb_base")


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The model classes that a config.json names, without the guard's prefix; empty if it names none."""
    return [str(name).removeprefix(PREFIX) for name in config.get("architectures") or ()]


def guarded(config: Mapping[str, Any], said: str) -> dict[str, Any]:
    """A copy of a config.json whose classes no runtime knows, with the text `said` for a theta at its top.

    The number stays in `rope_parameters`, which transformers and ctxext read first.
    """
    new = dict(config) | {name: said for name in _THETAS if name in config}
    names = [PREFIX + name for name in architectures(config)]
    return new | {"architectures": names} if names else new


def is_guard(value: object) -> bool:
    """Whether this is the text that the guard puts in a number's place."""
    return isinstance(value, str) and value.startswith("ctxext ")


def unguarded(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config.json without the guard: the classes' own names, no text for a theta."""
    new = {k: v for k, v in config.items() if k not in _THETAS or not is_guard(v)}
    names = architectures(config)
    return new | {"architectures": names} if names else new
