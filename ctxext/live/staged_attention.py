"""Attention of a live model under a staged schedule.

Each attention module of the instance gets a forward that brings keys to the stage of the queries and then runs the
module's own forward: whatever backend, projections, adapters or hooks it has stay in use. While all queries of a
call are in one stage per row, which is every decoding step and most chunks, that is one stock call. A call that
crosses stages is run segment by segment.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import CtxextError
from . import Foreign
from .blocks import check_causal, fit_options
from .cache import CACHE_NAMES, Block, align, expect, layer_of, length_of, remember, rows_of
from .stages import Plan, Segment, StagedRotary
from .undo import Patched


@dataclass
class Layer:
    """One attention module, its own forward, the rotary of its decoder, and what it calls its cache.

    first: it looks at the mask for all.
    """

    module: Foreign
    inner: Callable
    rotary: StagedRotary
    cache_name: str
    first: bool


@dataclass
class StagedCall:
    """One call of one layer. hidden_states: (batch, tokens, width); cos, sin: (rows, tokens, rotary width).

    cache, held: the cache, and this layer's part of it if that holds anything. mask: whatever the backend takes.
    options: the other keywords of the module's forward.
    """

    plan: Plan
    hidden_states: torch.Tensor
    position_embeddings: tuple[torch.Tensor, torch.Tensor]
    mask: Any
    cache: Any
    held: Any
    options: dict[str, Any]


def wrap(module: Foreign, rotary: StagedRotary, patched: Patched, *, first: bool) -> None:
    """Give one attention module its staged forward."""
    inner = module.forward
    name = next((n for n in CACHE_NAMES if n in inspect.signature(inner).parameters), None)
    if name is None:
        raise CtxextError(f"{type(module).__name__} takes no cache, so it can't run a staged schedule")
    patched.set_forward(module, functools.partial(_forward, Layer(module, inner, rotary, name, first)))


def attention_modules(owner: Foreign, *, unrotated: bool = False) -> list[Foreign]:
    """The attention modules of a decoder that rotate their queries and keys; with `unrotated` the others too."""
    found = [
        m
        for m in owner.modules()
        if "Attention" in type(m).__name__
        and hasattr(m, "layer_idx")
        and "position_embeddings" in inspect.signature(m.forward).parameters
        and (unrotated or getattr(m, "use_rope", True))
    ]
    if not found:
        raise CtxextError("this model's attention isn't built in transformers' standard way")
    return found


def _forward(
    layer: Layer,
    hidden_states: torch.Tensor,
    *args: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    module, rotary = layer.module, layer.rotary
    if args:
        raise CtxextError(f"{type(module).__name__} was called with positional arguments, which differ by family")
    fit_options(kwargs, layer.module.config)
    plan = getattr(position_embeddings, "plan", None)
    if plan is None:
        # Something on the way (an offloading hook) rebuilt the tuple.
        plan = rotary.plan(kwargs["position_ids"])
    cache = kwargs.pop(layer.cache_name, None)
    held = layer_of(cache, module, rotary.digest)
    if layer.first:
        check_causal(module, attention_mask, length_of(held), "a schedule of several stages")
    if len(plan.segments) > 1:
        call = StagedCall(plan, hidden_states, position_embeddings, attention_mask, cache, held, kwargs)
        return _segmented(layer, call)
    batch = hidden_states.shape[0]
    stages = rows_of(plan.segments[0].stages, batch)
    if held is not None:
        align(held, rotary, stages, plan, batch)
        expect(held)
    answer = layer.inner(
        hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        **{layer.cache_name: cache},
        **kwargs,
    )
    if cache is not None:
        remember(cache, module, rotary.digest, stages, plan.positions, known=plan.held)
    return answer


def _segmented(layer: Layer, call: StagedCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call that crosses stages: each segment attends to all keys so far, turned to its stage."""
    module, rotary, plan, options = layer.module, layer.rotary, call.plan, call.options
    batch = call.hidden_states.shape[0]
    cos, sin = call.position_embeddings
    positions = options.pop("position_ids", plan.positions)
    if any(k.startswith("cu_seq_lens") and v is not None for k, v in options.items()):
        raise CtxextError(
            "packed documents for flash attention can't cross stages",
            hint="pass position_ids with resets and no cu_seq_lens, or one document per row",
        )
    block = Block(rotary, plan, call.held, batch)
    outputs, weights = [], []
    for index, segment in enumerate(plan.segments):
        block.begin(index)
        part = slice(segment.start, segment.end)
        answer = layer.inner(
            call.hidden_states[:, part],
            position_embeddings=(cos[:, part], sin[:, part]),
            attention_mask=_part_of_mask(module, call, segment, block.past),
            position_ids=positions[:, part],
            **{layer.cache_name: block},
            **options,
        )
        outputs.append(answer[0])
        weights.append(answer[1])
    if call.cache is not None:
        assert block.turned is not None
        assert block.values is not None
        final = rows_of(plan.segments[-1].stages, batch)
        if call.held is not None and block.past:
            align(call.held, rotary, final, plan, batch)
            expect(call.held)
        call.cache.update(block.turned[:, :, block.past :], block.values[:, :, block.past :], module.layer_idx)
        remember(call.cache, module, rotary.digest, final, plan.positions, block.made(), plan.held)
    return torch.cat(outputs, 1), _join_weights(weights)


def _part_of_mask(module: Foreign, call: StagedCall, segment: Segment, past: int) -> Any:
    """The mask of one segment against the keys up to its end."""
    mask, plan, end = call.mask, call.plan, past + segment.end
    if isinstance(mask, torch.Tensor):
        return mask[..., segment.start : segment.end, :end] if mask.dim() == 4 else mask[:, :end]
    if mask is not None:
        return _part_of_block_mask(mask, segment, end)
    if "flash" in module.config._attn_implementation or segment.end - segment.start == 1:
        return None  # flash kernels align a short query block with the end of the keys
    if past + segment.start == 0:
        return None
    if segment not in plan.masks:
        size = segment.end - segment.start
        ones = torch.ones(size, end, dtype=torch.bool, device=plan.positions.device)
        plan.masks[segment] = ones.tril(end - size)[None, None]
    return plan.masks[segment].to(call.hidden_states.device)


def _part_of_block_mask(mask: Any, segment: Segment, end: int) -> Any:
    """The same for flex attention, whose mask is a function of indices."""
    from torch.nn.attention.flex_attention import create_block_mask

    inner, start = mask.mask_mod, segment.start
    return create_block_mask(
        lambda b, h, q, kv: inner(b, h, q + start, kv),
        B=mask.shape[0],
        H=mask.shape[1],
        Q_LEN=segment.end - start,
        KV_LEN=end,
        device=str(mask.kv_indices.device),
    )


def _join_weights(weights: list[Any]) -> Any:
    """Attention weights of all segments, zero where a segment's queries had no such key yet."""
    if any(w is None for w in weights):
        return None
    width = weights[-1].shape[-1]
    return torch.cat([nn.functional.pad(w, (0, width - w.shape[-1])) for w in weights], -2)
