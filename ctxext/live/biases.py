"""Biases by distance, ALiBi and T5, given to whatever attention backend a model uses.

ALiBi is linear in the distance, -m (i - j), and a softmax doesn't see what is the same for all keys of a query.
So m j alone is enough, and that is an inner product: one more coordinate per head, m on the query and j on the
key. No heads x L x L tensor exists, and fused kernels stay in use. In bfloat16 the slope is split into two
numbers and the position into two digits of base 256, all exact or nearly so, as kernels add products in float32.
A backend that rounds scores to bfloat16 itself (eager, sdpa without a fused kernel) would lose them beside a
large m j; it is given the bias as a mask instead, for a block of queries at a time. So is every T5 bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import CtxextError
from ..rope.encodings import Bias, alibi_slopes, t5_buckets

TABLE = "ctxext_bias"
"""Where a decoder holds its learned table; weights files have it under this name."""
BLOCK = 2**23
"""Elements of a bias that exist at a time: 32 MiB in float32."""
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


class T5Bias(nn.Module):
    """The learned table of a T5 bias, (buckets, heads), shared by all layers."""

    def __init__(self, bias: Bias, heads: int):
        super().__init__()
        table = torch.zeros(bias.buckets, heads)
        buckets = t5_buckets(bias.buckets, bias.max_distance)
        if bias.start == "alibi":
            smallest = torch.tensor([buckets.index(b) if b in buckets else 0 for b in range(bias.buckets)])
            table = -smallest[:, None] * torch.tensor(alibi_slopes(heads))
        self.table = nn.Parameter(table)
        self.bucket_of = buckets

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Distances (rows, queries, keys) to biases (rows, heads, queries, keys); negative ones count as 0."""
        buckets = torch.tensor(self.bucket_of, device=distance.device)
        index = buckets[distance.clamp(0, len(self.bucket_of) - 1)]
        return self.table[index].permute(0, 3, 1, 2)


@cache
def _slopes(heads: int) -> tuple[float, ...]:
    return tuple(alibi_slopes(heads))


def attend(
    bias: Bias,
    learned: nn.Module | None,
    stock: Callable,
    backend: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`stock` attention with the bias. queries, keys: (rows, tokens) and (rows, slots), their positions."""
    if bias.kind == "alibi" and backend != "eager":
        exact = query.dtype in (torch.float32, torch.float64) or backend != "sdpa"
        wide = _with_coordinates(query, key, value, queries, keys, given["scaling"])
        try:
            if exact:
                out, weights = stock(module, *wide, mask, **given)
            else:
                with sdpa_kernel(_FUSED):
                    out, weights = stock(module, *wide, mask, **given)
            return out[..., : value.shape[-1]], weights
        except RuntimeError as error:
            if exact or "kernel" not in str(error):
                raise
    if "flash" in backend:
        raise CtxextError(f"{backend} takes no T5 bias", hint="load the model with attn_implementation='sdpa'")
    outs, weights = [], []
    for part in blocks(query, keys.shape[1]):
        here = queries[:, part].to(query.device)
        distance = here[:, :, None] - keys.to(query.device)[:, None, :]
        if bias.kind == "alibi":
            slopes = torch.tensor(_slopes(query.shape[1]), device=query.device)
            added = -slopes[:, None, None] * distance.clamp(min=0)[:, None]
        else:
            added = learned(distance)
        seen = visible(mask, query, key.shape[2], part)
        # The least float instead of -inf: a pad that sees nothing must not turn into NaN.
        added = torch.where(seen, added, torch.finfo(query.dtype).min).to(query.dtype)
        if backend == "flex_attention":
            # transformers' flex takes a mask for all heads only; this argument of it is per head.
            added = added.expand(query.shape[0], -1, -1, -1)
            answer = stock(module, query[:, :, part], key, value, None, position_bias=added, **given)
        else:
            answer = stock(module, query[:, :, part], key, value, added, **given)
        outs.append(answer[0])
        weights.append(answer[1])
    return torch.cat(outs, 1), None if weights[0] is None or backend == "flex_attention" else torch.cat(weights, 2)


def blocks(query: torch.Tensor, keys: int) -> Iterator[slice]:
    """The queries in blocks that see every key, small enough for their bias."""
    batch, heads, count = query.shape[:3]
    size = max(16, BLOCK // (batch * heads * keys))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _with_coordinates(query, key, value, queries, keys, scaling):
    """Query, key and value with the coordinates whose product is m j; those of values are zero, cut off later."""
    queries, keys = queries.to(query.device), keys.to(query.device)
    slopes = torch.tensor(_slopes(query.shape[1]), dtype=torch.float64, device=query.device) / scaling
    # Counted back from the farthest query: what is near has small numbers.
    behind = queries.amax(1, keepdim=True) - keys
    if query.dtype in (torch.float32, torch.float64):
        sides = [(-slopes, behind)]
    else:
        high = slopes.to(query.dtype)
        low = (slopes - high.double()).to(query.dtype)
        # (on the query, on the key): float16 holds nothing above 65504, so the highest digit is split over both.
        steps = [(256, behind // 65536 * 256), (256, behind // 256 % 256), (1, behind % 256)]
        sides = [(-part * step, digit) for part in (high, low) for step, digit in steps]
    width = -len(sides) % 8 if query.is_cuda else 0
    on_query = torch.stack([side.to(query.dtype) for side, _ in sides], -1)[None, :, None, :]
    on_key = torch.stack([side.to(query.dtype) for _, side in sides], -1)[:, None]
    wide = []
    for tensor, more in ((query, on_query), (key, on_key), (value, None)):
        if more is not None:
            tensor = torch.cat((tensor, more.expand(*tensor.shape[:3], -1)), -1)
        wide.append(nn.functional.pad(tensor, (0, width if more is not None else width + len(sides))))
    return wide


def visible(mask: Any, query: torch.Tensor, keys: int, part: slice) -> torch.Tensor:
    """Which keys each query of `part` may see, bool (batch or 1, 1, queries, keys), from any backend's mask."""
    device, count = query.device, query.shape[2]
    if mask is None:
        # Left out by transformers where sdpa's own causal mask is right: a prefill (of a fixed-size cache too,
        # whose further slots are empty), or one query that sees every key.
        slots = torch.arange(keys, device=device)
        return (slots <= slots[:count][part, None] if count > 1 else slots >= 0)[None].view(1, 1, -1, keys)
    if isinstance(mask, torch.Tensor):
        if mask.dim() == 2:  # of flash attention: only which keys are pads
            return mask[:, None, None, -keys:].bool().expand(-1, -1, part.stop - (part.start or 0), -1)
        mask = mask[:, :, part, :keys].to(device)
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    from torch.nn.attention.flex_attention import create_mask

    start = part.start or 0
    inner = mask.mask_mod
    return create_mask(
        lambda b, h, q, k: inner(b, h, q + start, k), mask.shape[0], 1, part.stop - start, keys, device=str(device)
    )
