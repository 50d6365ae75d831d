"""Attention of a live model under an encoding that changes it.

transformers' attention modules rotate queries and keys, put keys into the cache, and then look up an attention
function by `config._attn_implementation`. Each module of a patched instance sees its config through a thin proxy
that answers "ctxext" there. So the function below gets queries and all keys in between, and the encoding adds a
bias, scales queries or rotates both by other distances, and gives them to whatever backend the model is set to.
Every projection, norm, cache or hook around it stays the model's own. The name "ctxext" is registered with
transformers once; no other model's behaviour changes by it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from ..config.block import digest
from ..errors import CtxextError
from . import Foreign
from .blocks import check_causal, check_not_traced, fit_options
from .cache import CACHE_NAMES, expect, joined, layer_of, positions_held, remember
from .encoding import Attended, AttentionCall, LiveEncoding
from .undo import Patched

NAME = "ctxext"


@dataclass
class Positions:
    """Where the tokens of one call of one layer are.

    queries: (rows, tokens). held: (rows, keys), those of the cached keys. reached: the attention function ran.
    """

    queries: torch.Tensor
    held: torch.Tensor | None
    reached: bool = False

    def keys(self, count: int) -> torch.Tensor:
        """Positions of `count` key slots, (rows, count). The empty ones of a fixed-size cache come after all."""
        known = self.queries if self.held is None else joined(self.held.to(self.queries.device), self.queries)
        empty = count - known.shape[1]
        if not empty:
            return known
        after = known.amax(1, keepdim=True) + torch.arange(1, empty + 1, device=known.device)
        return joined(known, after)


@dataclass
class Layer:
    """What one attention module runs."""

    module: Foreign
    inner: Callable
    cache_name: str
    encoding: LiveEncoding
    digest: str
    first: bool


class _Config:
    """A config that differs in one answer: which attention function its module shall use."""

    def __init__(self, config: Any, layer: Layer):
        self.__dict__.update(_config=config, _layer=layer, _attn_implementation=NAME)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_config", "_layer"):
            raise AttributeError(name)
        return getattr(self._config, name)


def wrap(module: Foreign, encoding: LiveEncoding, patched: Patched, *, first: bool) -> None:
    """Give one attention module its forward and its view of the config. first: it looks at the mask for all.

    Raises CtxextError for a family whose attention doesn't go through transformers' attention functions.
    """
    inner = module.forward
    names = inspect.signature(inner).parameters
    cache_name = next((n for n in CACHE_NAMES if n in names), None)
    source = sys.modules[type(module).__module__]
    keywords = any(p.kind is p.VAR_KEYWORD for p in names.values())
    stock = hasattr(source, "ALL_ATTENTION_FUNCTIONS") and hasattr(module, "config") and keywords
    if cache_name is None or not stock:
        raise CtxextError(
            f"{type(module).__name__} computes attention itself, without transformers' attention functions",
            hint="use a method that is a frequency table or staged (see `ctxext methods`)",
        )
    layer = Layer(module, inner, cache_name, encoding, digest(encoding.schedule), first)
    patched.set_view(module, _Config(module.config, layer))
    patched.set_forward(module, functools.partial(_forward, layer))


def unrotated(position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of no rotation at all."""
    cos, sin = position_embeddings
    return torch.ones_like(cos), torch.zeros_like(sin)


def _forward(layer: Layer, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs):
    module = layer.module
    positions = kwargs.get("position_ids")
    if args or positions is None:
        raise CtxextError(f"{type(module).__name__} was called without keywords, or without position_ids")
    check_not_traced(layer.encoding.schedule.method)
    fit_options(kwargs, module.config._config)
    cache, batch = kwargs.get(layer.cache_name), hidden_states.shape[0]
    held = layer_of(cache, module, layer.digest)
    before = positions_held(held, batch) if held is not None else None
    if layer.first:
        past = 0 if before is None else before.shape[1]
        check_causal(module, kwargs.get("attention_mask"), past, layer.encoding.schedule.method)
    if layer.encoding.own_rotation:
        position_embeddings = unrotated(position_embeddings)
    if held is not None:
        expect(held)
    # Among the keywords that transformers passes on to attention functions, and not kept in the model: several
    # threads may be in it at once.
    where = Positions(positions, before)
    answer = layer.inner(hidden_states, position_embeddings=position_embeddings, ctxext_positions=where, **kwargs)
    if not where.reached:
        raise CtxextError(f"the patch has no effect: {type(module).__name__} didn't use its attention function")
    if cache is not None:
        remember(cache, module, layer.digest, [0] * batch, positions)
    return answer


def attend(
    module: Foreign,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    ctxext_positions: Positions | None = None,
    **kwargs: Any,
) -> Attended:
    """The attention function of patched modules, in transformers' form. ctxext_positions: from `_forward`."""
    layer: Layer = module.config._layer
    if ctxext_positions is None:
        raise CtxextError(f"{type(module).__name__} doesn't pass its keywords on to its attention function")
    ctxext_positions.reached = True
    backend = module.config._config._attn_implementation or "eager"
    source = sys.modules[type(module).__module__]
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        queries=ctxext_positions.queries,
        keys=ctxext_positions.keys(key.shape[2]),
        backend=backend,
        stock=source.ALL_ATTENTION_FUNCTIONS.get_interface(backend, source.eager_attention_forward),
        options={"scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, "dropout": dropout, **kwargs},
    )
    return layer.encoding.attend(call)


AttentionInterface.register(NAME, attend)
