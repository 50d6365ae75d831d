"""How the live model runs a position encoding that cos and sin can't carry: the base class, and who runs which.

A class here is to a kind of `rope.encodings.Encoding` what a rotary module is to a table. It installs itself in
one decoder and, if attention itself is another, attends in place of the stock function (see `attention`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from ..errors import CtxextError
from ..rope import Schedule
from ..rope.encodings import Encoding

if TYPE_CHECKING:
    from .attention import AttentionCall
    from .undo import Patched

LEARNED = "ctxext_bias"
"""Where a decoder holds what its encoding learns; weights files have it under this name."""
_KEPT = "_ctxext_learned"
_RUNS: dict[type[Encoding], type[LiveEncoding]] = {}


class LiveEncoding:
    """Runs a schedule's encoding in one decoder, whose rotary module is the schedule's already.

    own_rotation: attention is given queries and keys that aren't rotated yet, and `attend` does it.
    """

    own_rotation: ClassVar[bool] = False

    def __init__(self, schedule: Schedule, owner: nn.Module):
        assert schedule.encoding is not None
        self.spec: Any = schedule.encoding
        self.schedule = schedule
        self.owner = owner

    def install(self, patched: Patched) -> None:
        """Change what isn't attention: forwards by `patched`, modules with weights by `learn`."""

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention of one layer: (batch, tokens, heads, head size), and weights if the backend gives any."""
        raise NotImplementedError

    def learn(self, made: nn.Module) -> None:
        """Give the decoder `made`, or the module that it had under an equal encoding.

        What was learned under a patch outlives it: the same patch, applied again, finds its weights (a temperature
        is fitted by patching many times over).
        """
        # A list hides a module from the decoder's own ones while it isn't in use.
        kept = self.owner.__dict__.get(_KEPT)
        if kept is None or kept[0] != self.spec:
            kept = self.owner.__dict__[_KEPT] = (self.spec, [made])
        self.owner.add_module(LEARNED, kept[1][0].to(self.owner.get_input_embeddings().weight.device))


def put_aside(owner: nn.Module) -> None:
    """Take what an encoding learned out of the decoder; its weights, as they are now, are kept."""
    kept = owner.__dict__.get(_KEPT)
    if kept is not None and hasattr(owner, LEARNED):
        kept[1][0] = getattr(owner, LEARNED)
        delattr(owner, LEARNED)


Class = TypeVar("Class", bound=type[LiveEncoding])


def runs(*kinds: type[Encoding]) -> Callable[[Class], Class]:
    """Register a class as the one that runs these kinds of encoding."""

    def register(cls: Class) -> Class:
        _RUNS.update(dict.fromkeys(kinds, cls))
        return cls

    return register


@cache
def _import_all() -> None:
    folder = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def live_encoding(schedule: Schedule, owner: nn.Module) -> LiveEncoding:
    """What runs the schedule's encoding; CtxextError if no class is registered for it."""
    _import_all()
    cls = _RUNS.get(type(schedule.encoding)) if schedule.encoding else None
    if cls is None:
        raise CtxextError(
            f"no class runs the encoding of {schedule.method} in a live model",
            hint="import the module that has it, with @runs above it (see ctxext.live.encoding)",
        )
    return cls(schedule, owner)
