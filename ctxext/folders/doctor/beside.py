"""Checks of what says a thing once more: other copies of the model, other names of its length."""

from __future__ import annotations

from ...config.keys import rope_parameters
from ..lengths import longer_config
from ..weights import native_copy, second_copies
from .check import Found, check
from .folder import Folder, set_keys


@check("warning", "llama.cpp#7486; vLLM's --config-format auto")
def copies_unscaled(folder: Folder) -> Found:
    """Copies of the model that the scaling in config.json doesn't reach."""
    if not folder.config or rope_parameters(folder.config)["rope_type"] == "default":
        return
    copies = [str(place) for place in second_copies(folder.path)]
    if copies:
        fix = "take them out, or patch the model they came with: ctxext patch leaves them out"
        if native_copy(folder.path):
            fix += "; vLLM takes them first unless it gets --config-format hf --load-format hf"
        what = f"{', '.join(copies)} hold the model once more, and run without the scaling in config.json"
        yield "weights", what, fix, None


@check("warning", "vLLM: the smallest of all names is the limit")
def lengths_differ(folder: Folder) -> Found:
    """A second name of the length that wasn't raised with it."""
    length = folder.length
    if not (folder.scaled or folder.ours) or not isinstance(length, int):
        return
    longer = longer_config(folder.config, length)
    changed = {key: value for key, value in longer.items() if value != folder.config[key]}
    if changed:
        said = ", ".join(f"{key} {folder.config[key]}" for key in changed)
        what = f"{said} beside max_position_embeddings {length}: some readers stop at the smallest"
        yield "config.json", what, f"write {length}", set_keys("config.json", **changed)
