"""Ways to search: functions `f(problem, *, constant=default, ...)` that ask `problem.evaluator` for losses.

As with methods, the signature is the only place where a strategy's constants are listed: they become `--set
NAME=VALUE`, and the files of this folder are found by looking. A strategy returns nothing: the evaluator remembers
the best candidate. It must depend on nothing but `problem` and the losses, so that it can be run again from a log.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ...errors import UsageError, nearest

_REGISTRY: dict[str, Callable[..., None]] = {}


def strategy(function: Callable[..., None]) -> Callable[..., None]:
    """Register a strategy under its function's name."""
    _REGISTRY[function.__name__] = function
    return function


@cache
def all_strategies() -> dict[str, Callable[..., None]]:
    """Every strategy by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def get(name: str) -> Callable[..., None]:
    """The strategy called `name`; UsageError with the nearest name if there is none."""
    found = all_strategies().get(name)
    if found is None:
        raise UsageError(f"there is no search strategy {name!r}", hint=nearest(name, all_strategies()))
    return found


def constants(name: str, given: Mapping[str, Any] = {}) -> dict[str, Any]:
    """All constants of a strategy, those in `given` changed.

    Raises UsageError for an unknown one, or a value that isn't a number of the right kind, or negative.
    """
    parameters = [p for p in inspect.signature(get(name)).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = typing.get_type_hints(get(name))
    known = {p.name: p.default for p in parameters}
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"strategy {name!r} has no constant {key!r}", hint=nearest(key, known))
        whole = hints[key] is int
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            kind = "a whole number" if whole else "a number"
            raise UsageError(f"constant {key!r} of strategy {name!r} must be {kind} from 0, got {value!r}")
        known[key] = value if whole else float(value)
    return known
