"""Attention a block of queries at a time: which queries, and which keys each of them may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

BLOCK = 2**23
"""Elements of scores or of a bias that exist at a time: 32 MiB in float32."""


def blocks(query: torch.Tensor, keys: int) -> Iterator[slice]:
    """The queries (batch, heads, tokens, head size) in blocks that see every key, small enough for their bias."""
    batch, heads, count = query.shape[:3]
    size = max(16, BLOCK // (batch * heads * keys))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


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
