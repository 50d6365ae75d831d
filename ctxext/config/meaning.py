"""What the scalings mean that others publish: each rope type of transformers as the method that runs the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import methods
from ..errors import CtxextError
from ..rope import Rope, Schedule
from .keys import OLD_NAMES, ROPE_TYPES, number

Keys = Mapping[str, Any]


def published_scaling(rope: Rope, found: Keys, length: float | None) -> Schedule:
    """The Schedule of a scaling by its keys, `rope_parameters` of a config.

    rope: as it was before the scaling. length: the config's max_position_embeddings, in tokens.
    Raises CtxextError for a type without fixed frequencies and for missing keys.
    """
    kind = found["rope_type"]
    factor = number(found, "factor") or (length / rope.trained_length if length else 1.0)
    meaning = _MEANINGS.get(OLD_NAMES.get(str(kind), str(kind)))
    if meaning is None:
        raise CtxextError(
            f"this checkpoint is already scaled by rope type {kind!r}, which has no fixed frequencies to build on",
            hint="pass --existing replace to drop that scaling and patch its original rope",
        )
    try:
        return meaning(rope, found, factor)
    except KeyError as error:
        raise CtxextError(
            f"the {kind} scaling in config.json lacks {error}",
            hint="take the config from the base model, or pass --existing replace to drop that scaling",
        ) from None


def _linear(rope: Rope, found: Keys, factor: float) -> Schedule:
    return methods.schedule(rope, "pi", factor)


def _with_options(name: str) -> Callable[[Rope, Keys, float], Schedule]:
    """A type whose keys are the options of the method of the same name."""

    def meaning(rope: Rope, found: Keys, factor: float) -> Schedule:
        given = {o.name: found[o.name] for o in methods.get(name).options if found.get(o.name) is not None}
        # What transformers knows no defaults for.
        given |= {key: found[key] for key in ROPE_TYPES[name].required}
        return methods.schedule(rope, name, factor, **given)

    return meaning


def _longrope(rope: Rope, found: Keys, factor: float) -> Schedule:
    if found["short_factor"] != found["long_factor"]:
        raise CtxextError(
            "this checkpoint switches between short and long factors by the length of the call",
            hint="pass --existing replace to drop that scaling and patch its original rope",
        )
    options = {"long_factor": found["long_factor"], "attention_factor": found.get("attention_factor")}
    return methods.schedule(rope, "longrope", max(factor, 1.0), **options)


_MEANINGS = {
    "linear": _linear,
    "yarn": _with_options("yarn"),
    "llama3": _with_options("llama3"),
    "longrope": _longrope,
}
