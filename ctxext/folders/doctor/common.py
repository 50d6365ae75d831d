"""What the checks share: reading a folder's scaling, and small mends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import Folder

Found = Iterator[tuple[str, str, str, Callable[[Folder], None] | None]]
ORIGINAL = "original_max_position_embeddings"
WITH_ORIGINAL = ("yarn", "longrope", "llama3")
CLOSE = 1e-4


def set_keys(name: str, **keys: Any) -> Callable[[Folder], None]:
    """A mend that sets keys of one file."""

    def mend(folder: Folder) -> None:
        folder.files[name] = {**folder.files.get(name, {}), **keys}

    return mend


def drop_key(name: str, key: str) -> Callable[[Folder], None]:
    """A mend that takes a key out of one file."""

    def mend(folder: Folder) -> None:
        folder.files[name].pop(key, None)

    return mend


def set_scaling(drop: tuple[str, ...] = (), **keys: Any) -> Callable[[Folder], None]:
    """A mend that changes the scaling in both dialects, wherever it stands."""

    def mend(folder: Folder) -> None:
        for dialect in ("rope_scaling", "rope_parameters"):
            found = folder.config.get(dialect)
            if isinstance(found, dict):
                new = {k: v for k, v in found.items() if k not in drop} | keys
                if "rope_type" in keys and "type" in new:
                    new["type"] = keys["rope_type"]
                folder.config[dialect] = new

    return mend


def nested(folder: Folder) -> bool:
    """Whether the rope is given per layer type."""
    return any(isinstance(value, dict) for value in folder.scaling.values())


def ours(folder: Folder) -> bool:
    """Whether ctxext wrote the config."""
    return bool(folder.config.get("ctxext"))


def scaled(folder: Folder) -> bool:
    """Whether the config carries a scaling."""
    return folder.kind not in ("default", "None") and not nested(folder)


def lengths(folder: Folder) -> tuple[float | None, float | None, float | None]:
    """(max_position_embeddings, original length, factor) as the folder says them; None for what is no number."""
    config, keys = folder.config, folder.scaling
    told = (config.get("max_position_embeddings"), config.get(ORIGINAL) or keys.get(ORIGINAL), keys.get("factor"))
    return tuple(value if isinstance(value, int | float) else None for value in told)
