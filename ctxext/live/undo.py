"""What undoing a patch needs: everything that it changes is changed through here."""

from __future__ import annotations

import copy
import gc
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..rope import Schedule
from . import Foreign

LEARNED = "ctxext_bias"
"""Where a decoder holds what its encoding learns; weights files have it under this name."""
_STATE = "_ctxext"
_KEPT = "_ctxext_learned"


class _MISSING:
    """Stands for an attribute that wasn't there. A class, as copies and pickles of a model keep its identity."""


def own_config(owner: Foreign, model: Foreign) -> None:
    """Give the model that `owner` is the decoder of a config that no other model has. model: it, or part of it.

    Models may be built from one config object, and a patch of one mustn't change the others. Within the model it
    stays one object, for wrappers too, and configs that hold it (of a model with a vision part) hold the copy.
    """
    inner, nobodys = owner.rotary_emb.config, object()
    holders = sys.getrefcount(inner) - sys.getrefcount(nobodys)
    if holders == sum(value is inner for module in model.modules() for value in vars(module).values()):
        return  # Nobody outside of the model has it: no need to walk through the whole heap.
    memo = {}
    for module in _parts(owner, inner):
        for name, value in list(vars(module).items()):
            if _reaches(value, inner):
                setattr(module, name, copy.deepcopy(value, memo))


def _parts(owner: Foreign, inner: Any) -> set[nn.Module]:
    """All modules of the model that `owner` is the decoder of: who patches an inner one may save the outer one."""
    # A module doesn't know what it is in. type(), as isinstance would ask lazy objects for their class.
    found = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_modules" in vars(o)]
    around, new = {owner}, {owner}
    while new:
        new = {m for m in found if not new.isdisjoint(vars(m)["_modules"].values())} - around
        around |= new
    parts = set(around)
    for child in {child for whole in around for child in whole.children()} - around:
        # Two models in one container, a policy and its reference, don't become one by it.
        if not any(getattr(getattr(m, "rotary_emb", None), "config", None) is inner for m in child.modules()):
            parts.update(child.modules())
    return parts


def _reaches(value: Any, inner: Any) -> bool:
    """Whether a config is `inner` or holds it."""
    if value is inner:
        return True
    return isinstance(value, PretrainedConfig) and any(_reaches(v, inner) for v in vars(value).values())


def _get(config: Any, key: str) -> Any:
    """A key of a config, or _MISSING. rope_scaling is saved if it is there, its attribute is rope_parameters."""
    return vars(config).get(key, _MISSING) if key == "rope_scaling" else getattr(config, key, _MISSING)


def _set(config: Any, key: str, value: Any) -> None:
    """Give a key of a config the value that `_get` found, or another one."""
    if value is _MISSING:
        vars(config).pop(key)
    elif key == "rope_scaling":
        vars(config)[key] = value
    else:
        setattr(config, key, value)


@dataclass
class Patched:
    """A patched decoder, `owner`, and what it was before.

    config: values that keys of its config had. windows: sliding windows of single modules. forwards, views: the
    forward and the config that single modules had of their own.
    """

    owner: Foreign
    schedule: Schedule
    rotary: Foreign
    config: dict[str, Any] = field(default_factory=dict)
    windows: list[tuple[Foreign, Any]] = field(default_factory=list)
    forwards: dict[Foreign, Any] = field(default_factory=dict)
    views: dict[Foreign, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, owner: Foreign) -> Patched | None:
        """The patch that a decoder runs, or None."""
        return getattr(owner, _STATE, None)

    def begin(self, replacement: Foreign) -> None:
        """Put the new rotary module in place, and remember this patch in the decoder."""
        self.owner.rotary_emb = replacement
        setattr(self.owner, _STATE, self)

    def set_config(self, key: str, value: Any) -> None:
        """Change a key of the decoder's config."""
        config = self.rotary.config
        self.config.setdefault(key, _get(config, key))
        _set(config, key, value)

    def set_forward(self, module: Foreign, forward: Any) -> None:
        """Give one module of the instance another forward."""
        self.forwards.setdefault(module, module.__dict__.get("forward", _MISSING))
        module.forward = forward

    def set_view(self, module: Foreign, view: Any) -> None:
        """Give one module of the instance another view of its config."""
        self.views.setdefault(module, getattr(module, "config", _MISSING))
        module.config = view

    def drop_window(self, module: Foreign) -> None:
        """Take a module's sliding window away."""
        self.windows.append((module, module.sliding_window))
        module.sliding_window = None

    def learn(self, made: nn.Module) -> None:
        """Give the decoder `made`, or the module that it had under an equal encoding.

        What was learned under a patch outlives it: the same patch, applied again, finds its weights (a temperature
        is fitted by patching many times over).
        """
        # A dict hides modules from the decoder's own ones while they aren't in use.
        kept = self.owner.__dict__.setdefault(_KEPT, {})
        module = kept.setdefault(self.schedule.encoding, made)
        device = self.owner.get_input_embeddings().weight.device
        # Offloaded weights have a place that holds nothing; the table is small and stays where it was made.
        self.owner.add_module(LEARNED, module if device.type == "meta" else module.to(device))

    def config_before(self) -> dict[str, Any]:
        """The decoder's config as a dict, with the values that it had before the patch."""
        now = self.rotary.config.to_dict()
        before = {**now, **{k: v for k, v in self.config.items() if v is not _MISSING}}
        return {k: v for k, v in before.items() if self.config.get(k) is not _MISSING}

    def undo(self, model: Foreign) -> None:
        """Give everything back as it was. model: the one that was patched, or part of it."""
        # The module that goes is in a circle, and would be counted among those who hold the config.
        self.owner.rotary_emb.config = None
        self.owner.rotary_emb = self.rotary
        for module, window in self.windows:
            module.sliding_window = window
        for module, forward in self.forwards.items():
            if forward is not _MISSING:
                module.forward = forward
            elif "forward" in module.__dict__:
                del module.forward
        self._restore_views()
        kept = self.owner.__dict__.get(_KEPT)
        if kept is not None and hasattr(self.owner, LEARNED):
            # Its weights, as they are now, are kept.
            kept[self.schedule.encoding] = getattr(self.owner, LEARNED)
            delattr(self.owner, LEARNED)
        delattr(self.owner, _STATE)
        # A copy again: a model may have been built from the config of this one while it was patched.
        own_config(self.owner, model)
        config = self.owner.rotary_emb.config
        for key, value in self.config.items():
            _set(config, key, value)

    def _restore_views(self) -> None:
        # In a function of its own: no name of `undo` may hold the config when its holders are counted.
        for module, view in self.views.items():
            if view is not _MISSING:
                module.config = view
        self.views.clear()
