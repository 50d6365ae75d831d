"""Attention in which far keys are given other rotary distances: Self-Extend, ReRoPE, dual-chunk attention.

The cache holds keys that aren't rotated. Every pair of query and key belongs to exactly one part; in a part,
queries and keys have positions of their own, and are rotated by those. The scores of all parts go through one
softmax. It is written in plain tensor operations over blocks of queries, so that it runs on any device and in
training; no heads x L x L tensor exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CtxextError
from ..rope.encodings import Distances
from .biases import blocks, visible
from .stages import turn_keys


@dataclass(frozen=True)
class Part:
    """Pairs of a query and a key whose positions are what `query` and `key` make of the true ones."""

    query: Callable[[torch.Tensor], torch.Tensor]
    key: Callable[[torch.Tensor], torch.Tensor]
    holds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def parts(spec: Distances) -> list[Part]:
    """The parts of a rule; for every key that isn't after the query, exactly one holds."""
    window, group, chunk = spec.window, spec.group, spec.chunk

    def same(p: torch.Tensor) -> torch.Tensor:
        return p

    if spec.kind == "chunks":

        def inside(p: torch.Tensor) -> torch.Tensor:
            return p % chunk

        def apart(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return q // chunk - k // chunk

        last = chunk + window - 1
        return [
            Part(inside, inside, lambda q, k: apart(q, k) == 0),
            Part(lambda q: (q % chunk + chunk).clamp(max=last), inside, lambda q, k: apart(q, k) == 1),
            Part(lambda q: torch.full_like(q, last), inside, lambda q, k: apart(q, k) > 1),
        ]
    near = Part(same, same, lambda q, k: q - k < window)
    if spec.kind == "grouped":
        whole = int(group)
        shift = window - window // whole
        return [near, Part(lambda q: q // whole + shift, lambda k: k // whole, lambda q, k: q - k >= window)]
    if not group:
        return [
            near,
            Part(lambda q: torch.full_like(q, window), torch.zeros_like, lambda q, k: q - k >= window),
        ]
    shift = window - window / group
    return [near, Part(lambda q: q / group + shift, lambda k: k / group, lambda q, k: q - k >= window)]


def attend(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by the layer's rule. query and key aren't rotated; queries, keys: their positions."""
    unknown = [k for k in ("softcap", "s_aux", "sliding_window", "cu_seq_lens_q") if given.get(k) is not None]
    if unknown:
        raise CtxextError(f"{layer.schedule.method} can't run with this model's {', '.join(unknown)}")
    batch, heads, _, size = query.shape
    groups = heads // key.shape[1]
    rules = parts(layer.schedule.distances)
    turned = [_turned(layer, key, rule.key(keys)) for rule in rules]
    outs = []
    for block in blocks(query, key.shape[2]):
        here = queries[:, block]
        seen = here[:, :, None] >= keys[:, None, :]
        if mask is not None:
            seen = seen & visible(mask, query, key.shape[2], block)[:, 0]
        scores, values = [], []
        for rule, its_keys in zip(rules, turned, strict=True):
            pairs = rule.holds(here[:, :, None], keys[:, None, :]) & seen
            used = pairs.flatten(0, 1).any(0).nonzero().flatten()
            if not len(used):
                continue
            span = slice(int(used[0]), int(used[-1]) + 1)
            asked = _turned(layer, query[:, :, block], rule.query(here)) * scaling
            # Query heads that share a key head are rows of one product.
            asked = asked.reshape(batch, -1, groups * here.shape[1], size)
            score = (asked @ its_keys[:, :, span].mT).view(batch, heads, here.shape[1], -1)
            scores.append(score.masked_fill(~pairs[:, None, :, span], torch.finfo(score.dtype).min))
            values.append(value[:, :, span])
        # A pad may see no key at all: it gets nothing.
        if not scores:
            outs.append(value.new_zeros(batch, heads, here.shape[1], value.shape[-1]))
            continue
        weights = torch.softmax(torch.cat(scores, -1), -1, dtype=torch.float32).to(value.dtype)
        weights = torch.nn.functional.dropout(weights, dropout, dropout > 0)
        weights = weights.view(batch, -1, groups * here.shape[1], weights.shape[-1])
        outs.append((weights @ torch.cat(values, 2)).view(batch, heads, here.shape[1], -1))
    return torch.cat(outs, 2).transpose(1, 2), None


def _turned(layer: Any, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries or keys (batch, heads, tokens, head size) rotated by positions (rows, tokens)."""
    rotary = layer.rotary.scaled
    frequencies = rotary.inv_freq.to(device=positions.device, dtype=torch.float32)
    angles = (positions[..., None].float() * frequencies).double()
    scale = rotary.attention_scaling
    cos, sin = ((angles.cos() * scale).float(), (angles.sin() * scale).float())
    return turn_keys(states, cos.to(states.device), sin.to(states.device), layer.layout)
