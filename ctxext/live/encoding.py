"""How the live model runs a position encoding that cos and sin can't carry: the base class, and who runs which.

A class here is to a kind of `rope.encodings.Encoding` what a rotary module is to a table. It installs itself in
one decoder and, if attention itself is another, attends in place of the stock function (see `attention`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch

from ..errors import CtxextError
from ..rope import Schedule
from ..rope.encodings import Encoding
from . import Foreign
from .undo import Patched

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""(batch, tokens, heads, head size), and attention weights if the backend gives any."""
_RUNS: dict[type[Encoding], type[LiveEncoding]] = {}


@dataclass
class AttentionCall:
    """One call of one layer's attention.

    query, key, value: (batch, heads, tokens, head size), as transformers has them. queries, keys: their positions,
    (rows, tokens) and (rows, slots). backend, stock: the model's own attention function. options: what it is to be
    given beside, scaling and dropout among it.
    """

    module: Foreign
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    queries: torch.Tensor
    keys: torch.Tensor
    backend: str
    stock: Callable
    options: dict[str, Any]

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any) -> Attended:
        """The stock attention, with these in place of the call's own."""
        return self.stock(self.module, query, key, value, mask, **self.options, **more)


class LiveEncoding:
    """Runs a schedule's encoding in one decoder, whose rotary module is the schedule's already.

    own_rotation: attention is given queries and keys that aren't rotated yet, and `attend` does it.
    """

    own_rotation: ClassVar[bool] = False

    def __init__(self, schedule: Schedule, owner: Foreign):
        assert schedule.encoding is not None
        self.spec: Any = schedule.encoding
        self.schedule = schedule
        self.owner = owner

    def install(self, patched: Patched) -> None:
        """Change what isn't attention: forwards by `patched`, modules with weights by `learn` (see `undo`)."""

    def attend(self, call: AttentionCall) -> Attended:
        """The attention of one layer, if the encoding is in attention."""
        raise NotImplementedError


Class = TypeVar("Class", bound=type[LiveEncoding])


def runs(*kinds: type[Encoding]) -> Callable[[Class], Class]:
    """Register a class as the one that runs these kinds of encoding."""

    def register(cls: Class) -> Class:
        _RUNS.update(dict.fromkeys(kinds, cls))
        return cls

    return register


@cache
def _import_all() -> None:
    folder = importlib.import_module(str(__package__))
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def live_encoding(schedule: Schedule, owner: Foreign) -> LiveEncoding:
    """What runs the schedule's encoding; CtxextError if no class is registered for it."""
    _import_all()
    cls = _RUNS.get(type(schedule.encoding)) if schedule.encoding else None
    if cls is None:
        raise CtxextError(
            f"no class runs the encoding of {schedule.method} in a live model",
            hint="import the module that has it, with @runs above it (see ctxext.live.encoding)",
        )
    return cls(schedule, owner)
