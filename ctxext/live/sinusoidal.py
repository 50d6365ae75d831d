"""Sinusoids of the position, added to what the first decoder layer is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import CtxextError
from ..methods.sinusoidal import Sinusoids
from .encoding import LiveEncoding, runs
from .staged_attention import attention_modules
from .undo import Patched


@runs(Sinusoids)
class LiveSinusoids(LiveEncoding):
    """The first layer's input is the embeddings plus the table."""

    def install(self, patched: Patched) -> None:
        attention = attention_modules(self.owner)[0]
        layers = next(
            m
            for m in self.owner.modules()
            if isinstance(m, nn.ModuleList) and any(attention is inner for inner in m.modules())
        )
        first = layers[0]
        frequencies = tuple(self.spec.frequencies(self.owner.config.hidden_size))
        patched.set_forward(first, functools.partial(_forward, first.forward, frequencies, self.spec.scale))


def _forward(
    inner: Callable, frequencies: tuple[float, ...], scale: float, hidden_states: torch.Tensor, *args, **kwargs
) -> Any:
    positions = kwargs.get("position_ids")
    if positions is None:
        raise CtxextError("the first layer was called without position_ids, so sinusoids can't be added")
    frequency = torch.tensor(frequencies, dtype=torch.float64, device=positions.device)
    angles = positions[..., None].double() * frequency
    table = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., : hidden_states.shape[-1]]
    return inner(hidden_states + (scale * table).to(hidden_states), *args, **kwargs)
