"""What a search is asked for, and the model that it is asked of. No torch here."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import methods
from ..config.families import require_support
from ..config.read import native_schedule, read_rope, read_schedule
from ..errors import CtxextError, UsageError
from ..files import read_config
from ..folders.heads import require_causal
from ..folders.source import ModelDtype, resolve
from ..rope import Rope, Schedule
from . import strategies
from .space import Space, critical_floors, critical_frequency

Objective = Literal["perplexity", "needle"]
"""What is compared: the perplexity of all tokens, or of hidden keys alone (LongRoPE2)."""
Short = Literal["search", "original", "none"]
"""What reads positions below the trained length: factors searched for it, the original ones, the long ones."""
Existing = Literal["extend", "replace"]
"""With a model that is scaled already: start from that too, or from its original rope alone."""
Fallback = Literal["static", "refuse"]
"""What plain transformers makes of a schedule that it can't run."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a search is asked for: the arguments of `search_factors`, which explains them."""

    model: str
    factor: float
    data: tuple[str, ...]
    out: Path | None
    strategy: str
    constants: Mapping[str, Any]
    objective: Objective
    documents: int
    held_out: int
    short: Short
    evaluations: int | None
    start_tokens: tuple[int, ...]
    upper: float
    step: float
    critical: int | None
    attention_factor: float | None
    seed: int
    dtype: ModelDtype
    attention: str
    trained_length: int | None
    existing: Existing
    fallback: Fallback
    resume: bool
    force: bool

    def __post_init__(self):
        """Raise UsageError for what can't be right whatever the model is."""
        strategies.constants(self.strategy, self.constants)
        methods.check_factor(self.factor)
        for name, kind in typing.get_type_hints(Options).items():
            if typing.get_origin(kind) is Literal and getattr(self, name) not in typing.get_args(kind):
                known = ", ".join(typing.get_args(kind))
                raise UsageError(f"{name}={getattr(self, name)!r} is not one of {known}")
        if not self.data:
            raise UsageError("a search needs text to compare candidates on", hint="give --data a file or a folder")
        if self.documents < 1 or self.held_out < 0:
            raise UsageError("a search needs at least one document, and not fewer than none to check with")
        if self.evaluations is not None and self.evaluations < 1:
            raise UsageError(f"evaluations must be at least 1, not {self.evaluations}")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"the seed must lie in 0..{2**32 - 1}, not {self.seed}")
        if not 0 < self.upper < math.inf:
            raise UsageError(f"the largest factor must be a share above 0 of --factor, not {self.upper}")


@dataclass(frozen=True)
class Subject:
    """The model's folder, its original rope, the schedule to go on from, if any, and what it runs as it stands.

    as_it_is: None if that is to be replaced and no schedule can say it.
    """

    folder: Path
    rope: Rope
    previous: Schedule | None
    as_it_is: Schedule | None


def read_subject(options: Options) -> Subject:
    """Raises CtxextError for a model that can't be patched, or not gone on with at this factor."""
    folder = resolve(options.model, dtype="bfloat16" if options.dtype == "auto" else options.dtype)
    if (folder / "adapter_config.json").is_file():
        raise CtxextError(f"{folder} is an adapter", hint="merge it first: ctxext merge")
    config = read_config(folder)
    require_causal(config, folder, "a search")
    try:
        require_support(config)
    except CtxextError as error:
        raise CtxextError(error.message, hint="a search knows transformers' own families alone") from error
    if options.existing == "replace":
        rope = read_rope(config, trained_length=options.trained_length, existing="replace")
        return Subject(folder, rope, None, _runs(config, options.trained_length))
    now = native_schedule(config, options.trained_length) or read_schedule(config, options.trained_length)
    if now.method == "none":
        return Subject(folder, now.rope, None, now)
    _check_extends(now, options)
    return Subject(folder, now.rope, now, now)


def _runs(config: Mapping[str, Any], trained_length: int | None) -> Schedule | None:
    try:
        now = read_schedule(config, trained_length)
    except CtxextError:
        return None
    return None if now.encoding else now


def _check_extends(now: Schedule, options: Options) -> None:
    """Raise CtxextError unless the search can go on from a schedule."""
    anew = "pass --existing replace to begin from the original rope"
    if now.encoding or not any(now.stages[-1].inv_freq):
        raise CtxextError(f"{now.method} isn't a table of factors that a search could go on from", hint=anew)
    if now.rope.ratios:
        raise CtxextError("this folder's scaling was composed of two", hint="search the folder that it came from")
    if options.factor < now.factor:
        raise CtxextError(
            f"this model is extended to {now.factor:g} times its trained length already ({now.method}), "
            f"--factor {options.factor:g} would shorten that",
            hint=f"--factor counts from the original {now.rope.trained_length} tokens; or {anew}",
        )
    if options.trained_length not in (None, now.rope.trained_length):
        raise CtxextError(
            f"this model's schedule counts from {now.rope.trained_length} trained tokens, not from "
            f"{options.trained_length}",
            hint=f"leave out --trained-length, or {anew}",
        )


def long_space(options: Options, rope: Rope) -> Space:
    """The candidates at the target length."""
    floors: tuple[float, ...] = ()
    if options.critical is not None:
        at = critical_frequency(rope) if options.critical == -1 else options.critical
        floors = critical_floors(rope.size, options.factor, at)
    start_tokens = tuple(n for n in options.start_tokens if n <= rope.trained_length)
    if options.start_tokens and not start_tokens:
        raise UsageError(
            f"the start tokens {', '.join(map(str, options.start_tokens))} all lie beyond the trained length, "
            f"{rope.trained_length}"
        )
    return Space(rope.size, options.factor, options.upper, options.step, start_tokens, floors)
