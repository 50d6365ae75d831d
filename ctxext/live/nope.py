"""Layers that don't rotate among others that do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..methods.nope import UnrotatedLayers
from .attention import unrotated
from .encoding import LiveEncoding, runs
from .staged_attention import attention_modules
from .undo import Patched


@runs(UnrotatedLayers)
class LiveUnrotatedLayers(LiveEncoding):
    """The chosen layers are given cos and sin of no rotation."""

    def install(self, patched: Patched) -> None:
        chosen = set(self.spec.of(self.owner.config.num_hidden_layers))
        for module in attention_modules(self.owner):
            if module.layer_idx in chosen:
                patched.set_forward(module, functools.partial(_forward, module.forward))


def _forward(inner: Callable, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
    return inner(*args, position_embeddings=unrotated(position_embeddings), **kwargs)
