"""The registry of methods. Each is one typed function `f(rope, factor, *, option=default, ...) -> Schedule`.

The function is the only place where a method is described: its keyword-only arguments are the options of
the command line and of recipes, its docstring is the documentation, and the files of this folder are found
by looking. To add a method, add a function with `@method` in a file here; nothing else has to change.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..errors import UsageError, nearest
from ..rope import Rope, Schedule, target_length


@dataclass(frozen=True)
class Option:
    """A keyword-only argument of a method: its name, type and default."""

    name: str
    type: Any
    default: Any

    @property
    def type_name(self) -> str:
        """The type as a reader would write it, `float | None`."""
        if typing.get_origin(self.type) is typing.Literal:
            return " or ".join(map(str, typing.get_args(self.type)))
        return self.type.__name__ if isinstance(self.type, type) else str(self.type)


@dataclass(frozen=True)
class Method:
    """A registered method.

    replaces_rope: it puts another encoding in place of the rotation, so that even factor 1 changes the model.
    """

    name: str
    function: Callable[..., Schedule]
    title: str
    paper: str
    needs: tuple[str, ...]
    options: tuple[Option, ...]
    replaces_rope: bool

    @property
    def loads(self) -> str:
        """What plain transformers does with its folders: found by trying the method's defaults on a small rope."""
        rope = Rope(10000.0, 8, 64)
        given = dict.fromkeys(self.needs, [1.0] * rope.size)
        schedule = self(rope, 2, **given)
        if not schedule.is_static:
            return "needs `ctxext.load`"
        return f"`{schedule.native['rope_type']}`" if schedule.native else "`longrope`"

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")

    def __call__(self, rope: Rope, factor: float, **params: Any) -> Schedule:
        """The method's Schedule, with every option recorded in `params`.

        Raises UsageError for a factor below 1, an unknown option (with the nearest name), a value of the
        wrong type, an option that the method can't do without, or a method that changes rotation for a rope that
        has none left.
        """
        if rope.ratios and not any(rope.ratios) and not self.replaces_rope:
            others = ", ".join(m.name for m in all_methods().values() if m.replaces_rope)
            raise UsageError(
                f"this checkpoint doesn't rotate, so there is nothing that {self.name} could change",
                hint=f"choose one of {others}, or --existing replace to start from the original rope",
            )
        # Every runtime derives the factor from the two lengths at some point: keep all three consistent.
        factor = target_length(rope, check_factor(factor)) / rope.trained_length
        params = self.check(params)
        schedule = self.function(rope, factor, **params)
        return replace(schedule, method=self.name, factor=factor, params=params)

    def check(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values, converted to the types of the signature."""
        known = {option.name: option for option in self.options}
        for name in params:
            if name not in known:
                raise UsageError(f"method {self.name!r} has no option {name!r}", hint=nearest(name, known))
        values = {o.name: _convert(self, o, params.get(o.name, o.default)) for o in self.options}
        missing = [name for name in self.needs if values[name] is None]
        if missing:
            raise UsageError(
                f"method {self.name!r} needs {' and '.join(missing)}",
                hint=" ".join(f"--set {name}=..." for name in missing),
            )
        return values


def check_factor(factor: Any) -> float:
    """`factor` as a float; UsageError unless it is finite and at least 1."""
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
        raise UsageError(f"the factor must be a number, got {factor!r}", hint="for example --factor 4")
    if factor < 1:
        raise UsageError(
            f"the factor must be at least 1, got {factor}",
            hint="a factor of 4 makes the model read 4 times its trained length",
        )
    return float(factor)


def _convert(method: Method, option: Option, value: Any) -> Any:
    """`value` as the option's type, or a UsageError that names both."""
    wanted = [t for t in _alternatives(option.type) if t is not type(None)]
    nullable = len(wanted) < len(_alternatives(option.type))
    if value is None and nullable:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    for kind in wanted:
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and math.isfinite(number) and number == int(number):
            return int(number)
        if kind is float and math.isfinite(number):
            return float(number)
        if kind is str and isinstance(value, str):
            return value
        if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
            return value
        if typing.get_origin(kind) is list and isinstance(value, list | tuple):
            item = Option(f"{option.name}[]", typing.get_args(kind)[0], None)
            return [_convert(method, item, v) for v in value]
    raise UsageError(f"option {option.name!r} of method {method.name!r} must be {option.type_name}, got {value!r}")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


_REGISTRY: dict[str, Method] = {}


def method(
    *,
    title: str,
    paper: str,
    needs: tuple[str, ...] = (),
    replaces_rope: bool = False,
):
    """Register a function as a method; its name is the method's name.

    title: the name that papers use. paper: where the formula stands. needs: options without a usable
    default. replaces_rope: see `Method`.
    """

    def register(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        hints = typing.get_type_hints(function)
        options = tuple(
            Option(p.name, hints[p.name], p.default)
            for p in inspect.signature(function).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        )
        name = function.__name__
        if name in _REGISTRY:
            raise RuntimeError(f"two methods are called {name!r}")
        _REGISTRY[name] = Method(name, function, title, paper, needs, options, replaces_rope)
        return function

    return register


@cache
def all_methods() -> dict[str, Method]:
    """Every method by name, found by importing the files of this folder."""
    folder = importlib.import_module(str(__package__))
    for module in pkgutil.iter_modules(folder.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__package__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def get(name: str) -> Method:
    """The method called `name`; UsageError with the nearest name if there is none."""
    found = all_methods().get(name)
    if found is None:
        raise UsageError(f"there is no method {name!r}", hint=nearest(name, all_methods()))
    return found


def schedule(rope: Rope, name: str, factor: float, **params: Any) -> Schedule:
    """Schedule of method `name` for `rope`; see `Method.__call__` for the errors."""
    return get(name)(rope, factor, **params)


def options(apart: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """A method's options that were given in a dict of their own, and those given by name; UsageError for both."""
    twice = sorted(set(apart or ()) & set(named))
    if twice:
        raise UsageError(f"option {twice[0]!r} is given twice")
    return {**(apart or {}), **named}
