"""T5's learned bias by distance, for a block of queries at a time; and what every bias given as a mask shares."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import CtxextError
from ..methods.alibi import slopes
from ..methods.t5_bias import T5Bias
from .blocks import blocks, visible
from .encoding import Attended, AttentionCall, LiveEncoding, runs
from .undo import LEARNED, Patched


class MaskedBias(LiveEncoding):
    """A bias that is added to the logits as a mask, whatever the backend; no heads x L x L tensor exists."""

    def added(self, distance: torch.Tensor, heads: int) -> torch.Tensor:
        """Distances (rows, queries, keys) to biases (rows, heads, queries, keys)."""
        raise NotImplementedError

    def attend(self, call: AttentionCall) -> Attended:
        """Stock attention with the bias in its mask, a block of queries at a time."""
        query, key, value = call.query, call.key, call.value
        if "flash" in call.backend:
            raise CtxextError(
                f"{call.backend} takes no T5 bias", hint="load the model with attn_implementation='sdpa'"
            )
        outs, weights = [], []
        for part in blocks(query, call.keys.shape[1]):
            here = call.queries[:, part].to(query.device)
            added = self.added(here[:, :, None] - call.keys.to(query.device)[:, None, :], query.shape[1])
            seen = visible(call.mask, query, key.shape[2], part)
            # The least float instead of -inf: a pad that sees nothing must not turn into NaN.
            added = torch.where(seen, added, torch.finfo(query.dtype).min).to(query.dtype)
            if call.backend == "flex_attention":
                # transformers' flex takes a mask for all heads only; this argument of it is per head.
                added = added.expand(query.shape[0], -1, -1, -1)
                answer = call.run(query[:, :, part], key, value, None, position_bias=added)
            else:
                answer = call.run(query[:, :, part], key, value, added)
            outs.append(answer[0])
            weights.append(answer[1])
        known = weights[0] is not None and call.backend != "flex_attention"
        return torch.cat(outs, 1), torch.cat(weights, 2) if known else None


class T5Table(nn.Module):
    """The learned table, (buckets, heads), shared by all layers."""

    def __init__(self, spec: T5Bias, heads: int):
        super().__init__()
        table = torch.zeros(spec.buckets, heads)
        buckets = spec.bucket_of()
        if spec.start == "alibi":
            smallest = torch.tensor([buckets.index(b) if b in buckets else 0 for b in range(spec.buckets)])
            table = -smallest[:, None] * torch.tensor(slopes(heads))
        self.table = nn.Parameter(table)
        self.bucket_of = buckets

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Distances (rows, queries, keys) to biases (rows, heads, queries, keys); negative ones count as 0."""
        buckets = torch.tensor(self.bucket_of, device=distance.device)
        index = buckets[distance.clamp(0, len(self.bucket_of) - 1)]
        return self.table[index].permute(0, 3, 1, 2)


@runs(T5Bias)
class LiveT5Bias(MaskedBias):
    """The table sits in the decoder, so that it is trained and saved with it."""

    def install(self, patched: Patched) -> None:
        patched.learn(T5Table(self.spec, self.owner.config.num_attention_heads))

    def added(self, distance: torch.Tensor, heads: int) -> torch.Tensor:
        return getattr(self.owner, LEARNED)(distance)
