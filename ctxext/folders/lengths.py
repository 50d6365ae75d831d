"""Where a folder says once more how much the model reads: each stops a reader at the old length if it stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CtxextError
from ..files import is_marked, model_files

CONFIG_LENGTHS = (
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_target_positions",
    "model_max_length",
    "seq_len",
    "seq_length",
)
"""Further names of max_position_embeddings in a config.json. vLLM stops at the smallest of them all."""
Changed = dict[str, Any]
"""A JSON file's new content by its path in the folder."""


def longer_config(config: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A config.json in which no other name of its length says less, nor ends generation before it. In tokens."""
    new = {
        key: length if key in CONFIG_LENGTHS and _below(value, length) else value for key, value in config.items()
    }
    if _below(new.get("max_length"), length):
        del new["max_length"]
    return new


def longer_files(folder: Path, length: int) -> Changed:
    """What becomes of the other files that say a length, for a model that reads `length` tokens.

    tokenizer_config.json gets the length: tokenizers warn, and vLLM stops, at the old one. generation_config.json
    loses a max_length that would end generate() early. What sentence-transformers and a tokenizer.json cut texts
    at is raised. A byte order mark goes, as not all read past it. Raises CtxextError for a file that is damaged.
    """
    found: Changed = {}
    for file in model_files(folder):
        name = file.name
        for pattern, change in _CHANGES.items():
            if file.match(pattern) and (file.parent == Path() or name.startswith("sentence_")):
                data = _read(folder / file)
                new = change(data, length)
                if new != data or is_marked(folder / file):
                    found[str(file)] = new
    return found


def _tokenizer_config(data: dict[str, Any], length: int) -> dict[str, Any]:
    new = {**data, "model_max_length": length}
    return {**new, "max_length": length} if _below(data.get("max_length"), length) else new


def _tokenizer(data: dict[str, Any], length: int) -> dict[str, Any]:
    cut = data.get("truncation")
    if not isinstance(cut, dict) or not _below(cut.get("max_length"), length):
        return data
    return {**data, "truncation": {**cut, "max_length": length}}


def _generation(data: dict[str, Any], length: int) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k != "max_length" or not _below(v, length)}


def _sentence(data: dict[str, Any], length: int) -> dict[str, Any]:
    return {k: length if k == "max_seq_length" and _below(v, length) else v for k, v in data.items()}


_CHANGES: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "tokenizer_config.json": _tokenizer_config,
    "tokenizer.json": _tokenizer,
    "generation_config.json": _generation,
    "sentence_*config.json": _sentence,
}


def _below(value: Any, length: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < length


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CtxextError(f"{path} is damaged: {error}", hint="take this file from the base model") from error
    if not isinstance(data, dict):
        raise CtxextError(f"{path} holds no object", hint="take this file from the base model")
    return data
