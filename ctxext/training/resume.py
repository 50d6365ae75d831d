"""Begin a run's output folder, or resume it: by the same recipe only, from its newest whole checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError
from ..files import write_text
from .recipe import Recipe

FREE = (("eval",), ("train", "save_steps"), ("train", "keep"), ("train", "logging_steps"), ("train", "report_to"))
"""Keys that a resumed run may have changed: they don't touch what is computed."""


def begin(out: Path, recipe: Recipe, *, resume: bool) -> None:
    """Make `out` and write the resolved recipe, or refuse a folder that holds something else.

    Raises UsageError if it isn't empty without `resume`, or was begun with another recipe. The number of steps
    may differ where the learning rate doesn't depend on it.
    """
    begun = out / "recipe.yaml"
    if out.exists() and any(out.iterdir()):
        if not resume:
            raise UsageError(f"{out} isn't empty", hint="add --resume to go on with it, or set another output=")
        if not begun.is_file():
            raise UsageError(f"{out} holds no run to resume", hint="set another output=")
        before, now = yaml.safe_load(begun.read_text(encoding="utf-8")), yaml.safe_load(recipe.resolved())
        changed = sorted(_differences(_fixed(before, recipe), _fixed(now, recipe)))
        if changed:
            raise UsageError(
                f"{out} was begun with another recipe: {', '.join(changed)} differ",
                hint="set another output=, or give back the old values",
            )
    write_text(begun, recipe.resolved())


def _fixed(content: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The dotted keys that must stay as they are, with their values."""
    free = {".".join(key) for key in FREE}
    if recipe.train.schedule.startswith("constant"):
        free.add("train.steps")
    flat: dict[str, Any] = {}
    for name, section in content.items():
        if isinstance(section, dict):
            flat.update({f"{name}.{key}": value for key, value in section.items()})
        else:
            flat[name] = section
    if flat.get("model.attention") == "auto":
        flat["model.attention"] = "sdpa"  # what it is, and what older runs say
    return {k: v for k, v in flat.items() if k not in free and k.split(".")[0] not in free}


def _differences(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return {key for key in {*a, *b} if a.get(key) != b.get(key)}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: trainer_state.json is written last, so a kill leaves none of it."""

    def complete(path: Path) -> bool:
        try:
            return bool(json.loads((path / "trainer_state.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return False

    found = [p for p in folder.glob("checkpoint-*") if complete(p)]
    return max(found, key=lambda p: int(p.name.split("-")[1]), default=None)
