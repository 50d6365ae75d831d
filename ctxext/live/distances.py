"""Attention in which far keys are given other rotary distances: Self-Extend, ReRoPE, dual-chunk attention.

The cache holds keys that aren't rotated. Every pair of query and key belongs to exactly one part; in a part,
queries and keys have positions of their own, and are rotated by those. The scores of all parts go through one
softmax. It is written in plain tensor operations over blocks of queries, so that it runs on any device and in
training; no heads x L x L tensor exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import CtxextError
from ..methods.dual_chunk import DualChunk
from ..methods.rerope import ReRoPE
from ..methods.self_extend import SelfExtend
from ..rope import Schedule
from . import Foreign
from .blocks import blocks, visible
from .encoding import Attended, AttentionCall, LiveEncoding, runs
from .staged_attention import attention_modules
from .stages import find_layout, turn_keys


@dataclass(frozen=True)
class Part:
    """Pairs of a query and a key whose positions are what `query` and `key` make of the true ones."""

    query: Callable[[torch.Tensor], torch.Tensor]
    key: Callable[[torch.Tensor], torch.Tensor]
    holds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LiveDistances(LiveEncoding):
    """Base of the rules: `parts` says which, and for every key that isn't after the query exactly one holds."""

    own_rotation = True

    def __init__(self, schedule: Schedule, owner: Foreign):
        super().__init__(schedule, owner)
        self.layout = find_layout(attention_modules(owner)[0], owner.rotary_emb)

    def parts(self) -> list[Part]:
        """The parts of the rule."""
        raise NotImplementedError

    def attend(self, call: AttentionCall) -> Attended:
        query, key, value = call.query, call.key, call.value
        unknown = [
            k for k in ("softcap", "s_aux", "sliding_window", "cu_seq_lens_q") if call.options.get(k) is not None
        ]
        if unknown:
            raise CtxextError(f"{self.schedule.method} can't run with this model's {', '.join(unknown)}")
        scaling, dropout = call.options["scaling"], call.options["dropout"]
        batch, heads, _, size = query.shape
        groups = heads // key.shape[1]
        # Only asked for do they exist for all keys at once, as in the stock eager attention.
        asked_for = call.options.get("output_attentions") or getattr(
            call.module.config, "output_attentions", False
        )
        rules, keys = self.parts(), call.keys
        turned = [self._turned(key, rule.key(keys)) for rule in rules]
        outs, shown = [], []
        for block in blocks(query, key.shape[2]):
            here = call.queries[:, block]
            seen = here[:, :, None] >= keys[:, None, :]
            if call.mask is not None:
                seen = seen & visible(call.mask, query, key.shape[2], block)[:, 0]
            scores, values, spans = [], [], []
            for rule, its_keys in zip(rules, turned, strict=True):
                pairs = rule.holds(here[:, :, None], keys[:, None, :]) & seen
                used = pairs.flatten(0, 1).any(0).nonzero().flatten()
                if not len(used):
                    continue
                span = slice(int(used[0]), int(used[-1]) + 1)
                asked = self._turned(query[:, :, block], rule.query(here)) * scaling
                # Query heads that share a key head are rows of one product.
                asked = asked.reshape(batch, -1, groups * here.shape[1], size)
                score = (asked @ its_keys[:, :, span].mT).view(batch, heads, here.shape[1], -1)
                scores.append(score.masked_fill(~pairs[:, None, :, span], torch.finfo(score.dtype).min))
                values.append(value[:, :, span])
                spans.append(span)
            if asked_for:
                shown.append(value.new_zeros(batch, heads, here.shape[1], key.shape[2]))
            # A pad may see no key at all: it gets nothing.
            if not scores:
                outs.append(value.new_zeros(batch, heads, here.shape[1], value.shape[-1]))
                continue
            weights = torch.softmax(torch.cat(scores, -1), -1, dtype=torch.float32).to(value.dtype)
            weights = nn.functional.dropout(weights, dropout, dropout > 0)
            if asked_for:
                # Each pair is in one part, and nothing to the others.
                for span, part in zip(spans, weights.split([s.shape[-1] for s in scores], -1), strict=True):
                    shown[-1][..., span] += part
            weights = weights.view(batch, -1, groups * here.shape[1], weights.shape[-1])
            outs.append((weights @ torch.cat(values, 2)).view(batch, heads, here.shape[1], -1))
        return torch.cat(outs, 2).transpose(1, 2), torch.cat(shown, 2) if asked_for else None

    def _turned(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries or keys (batch, heads, tokens, head size) rotated by positions (rows, tokens)."""
        rotary = self.owner.rotary_emb
        frequencies = rotary.inv_freq.to(device=positions.device, dtype=torch.float32)
        angles = (positions[..., None].float() * frequencies).double()
        scale = rotary.attention_scaling
        cos, sin = ((angles.cos() * scale).float(), (angles.sin() * scale).float())
        return turn_keys(states, cos.to(states.device), sin.to(states.device), self.layout)


def _same(positions: torch.Tensor) -> torch.Tensor:
    return positions


@runs(SelfExtend)
class LiveSelfExtend(LiveDistances):
    """Exact near, grouped far."""

    def parts(self) -> list[Part]:
        window, group = self.spec.window, int(self.spec.group)
        shift = window - window // group
        return [
            Part(_same, _same, lambda q, k: q - k < window),
            Part(lambda q: q // group + shift, lambda k: k // group, lambda q, k: q - k >= window),
        ]


@runs(ReRoPE)
class LiveReRoPE(LiveDistances):
    """Exact near, one distance or slowly growing ones far."""

    def parts(self) -> list[Part]:
        window, step = self.spec.window, self.spec.step
        near = Part(_same, _same, lambda q, k: q - k < window)
        if not step:
            far = Part(lambda q: torch.full_like(q, window), torch.zeros_like, lambda q, k: q - k >= window)
            return [near, far]
        shift = window - window / step
        return [near, Part(lambda q: q / step + shift, lambda k: k / step, lambda q, k: q - k >= window)]


@runs(DualChunk)
class LiveDualChunk(LiveDistances):
    """Within a chunk, to the one before, and to all older ones."""

    def parts(self) -> list[Part]:
        chunk, last = self.spec.chunk, self.spec.chunk + self.spec.window - 1

        def inside(p: torch.Tensor) -> torch.Tensor:
            return p % chunk

        def apart(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return q // chunk - k // chunk

        return [
            Part(inside, inside, lambda q, k: apart(q, k) == 0),
            Part(lambda q: (q % chunk + chunk).clamp(max=last), inside, lambda q, k: apart(q, k) == 1),
            Part(lambda q: torch.full_like(q, last), inside, lambda q, k: apart(q, k) > 1),
        ]
