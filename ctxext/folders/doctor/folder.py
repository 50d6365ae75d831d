"""The JSON files of a model folder as the checks see them, and the small mends that several make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.keys import ORIGINAL


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

    @property
    def nested(self) -> bool:
        """Whether the rope is given per layer type."""
        return any(isinstance(value, dict) for value in self.scaling.values())

    @property
    def scaled(self) -> bool:
        """Whether the config carries a scaling."""
        return self.kind not in ("default", "None") and not self.nested

    @property
    def ours(self) -> bool:
        """Whether ctxext wrote the config."""
        return bool(self.config.get("ctxext"))

    @property
    def length(self) -> float | None:
        """max_position_embeddings; None if it is no number."""
        return _number(self.config.get("max_position_embeddings"))

    @property
    def original(self) -> float | None:
        """The length before scaling, in tokens; None if it is no number."""
        return _number(self.config.get(ORIGINAL) or self.scaling.get(ORIGINAL))

    @property
    def factor(self) -> float | None:
        """The scaling's factor; None if it is no number."""
        return _number(self.scaling.get("factor"))

    def has(self, name: str) -> bool:
        """Whether the folder holds this file."""
        return (self.path / name).is_file()


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


Mend = Callable[[Folder], None]


def set_keys(name: str, **keys: Any) -> Mend:
    """A mend that sets keys of one file."""

    def mend(folder: Folder) -> None:
        folder.files[name] = {**folder.files.get(name, {}), **keys}

    return mend


def drop_key(name: str, key: str) -> Mend:
    """A mend that takes a key out of one file."""

    def mend(folder: Folder) -> None:
        folder.files[name].pop(key, None)

    return mend


def set_scaling(drop: tuple[str, ...] = (), /, **keys: Any) -> Mend:
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
