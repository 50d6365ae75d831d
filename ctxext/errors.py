"""The error that users see: what is wrong, where, and the fix."""

from __future__ import annotations

import difflib
import importlib.util
import typing
import warnings
from collections.abc import Iterable
from typing import Any


class CtxextError(Exception):
    """A mistake that the user can mend. `hint` says how.

    The command line prints both lines without a traceback and exits with `exit_code`
    (1: the work failed; 2: wrong usage or a wrong recipe).
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  fix: {self.hint}"


class UsageError(CtxextError):
    """An option, a value or a recipe that can't be right whatever the model is."""

    exit_code = 2


class CtxextWarning(UserWarning):
    """Something works, but probably not as the user expects."""


def warn(message: str) -> None:
    """Emit a CtxextWarning that points at the caller of the public function."""
    warnings.warn(message, CtxextWarning, stacklevel=3)


def nearest(name: str, choices: Iterable[str]) -> str:
    """A 'did you mean' sentence with the closest of `choices`, or the list of them.

    >>> nearest("beta_fsat", ["beta_fast", "beta_slow"])
    "did you mean 'beta_fast'?"
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "choose one of: " + ", ".join(choices) if choices else "it takes no options"


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise UsageError unless `value` is one of a Literal's. name: of the argument."""
    known = typing.get_args(choices)
    if value not in known:
        raise UsageError(f"{name}={value!r} is not one of {', '.join(known)}")


def require(what: str, extra: str, *packages: str) -> None:
    """Raise CtxextError unless these packages are installed. extra: the extra of ctxext that brings them.

    Asked before any work begins, and without importing them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise CtxextError(f"{what} needs {' and '.join(missing)}", hint=f"pip install 'ctxext[{extra}]'")
