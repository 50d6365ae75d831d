"""Which keys a query may see: by any backend's mask, for a block of queries at a time; and that none is later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import CtxextError
from . import Foreign

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


def check_causal(module: Foreign, mask: Any, past: int, method: str) -> None:
    """Raise CtxextError if a call lets tokens see later ones, which stages and changed attention don't allow.

    mask: of the call, in the backend's form. past: keys that the cache holds already.
    """
    config = getattr(module, "config", None)
    free = getattr(module, "is_causal", True) is False or getattr(config, "is_causal", True) is False
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        step = max(1, BLOCK // (mask.shape[0] * mask.shape[3]))
        for start in range(0, mask.shape[2], step):
            part = mask[:, :, start : start + step]
            seen = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
            # A pad may see whatever it likes: nobody reads what comes of it.
            real = seen.diagonal(past + start, 2, 3)
            later = seen.triu(past + start + 1)[:, :, : real.shape[-1]]
            free = free or bool((later & real[..., None]).any())
    elif mask is not None and not isinstance(mask, torch.Tensor):
        keys = torch.arange(past + 1, mask.seq_lengths[1], device=mask.kv_indices.device)
        zero = torch.zeros_like(keys)
        free = free or bool(len(keys) and mask.mask_mod(zero, zero, zero, keys).any())
    if free:
        raise CtxextError(
            "this call lets tokens see later ones (is_causal=False, or a mask that shows them): "
            f"{method} is defined for causal attention only",
            hint="use a static method, such as yarn",
        )


def fit_options(options: dict[str, Any], config: Any) -> None:
    """Make the keywords of a call fit its backend.

    What tells flash kernels where packed documents end is taken away from others, which read it from the mask.
    Raises CtxextError if attention weights are asked of a backend that has none.
    """
    backend = str(config._attn_implementation)
    if "flash" not in backend:
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            options.pop(name, None)
    if options.get("output_attentions") and backend not in ("eager", "None"):
        raise CtxextError(
            f"{backend} gives no attention weights", hint="model.set_attn_implementation('eager') before the call"
        )


def check_not_traced(method: str) -> None:
    """Raise CtxextError in torch.export and torch.jit.trace, whose programs would keep what one text needed."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise CtxextError(
            f"{method} can't be exported or traced: what it computes depends on the positions",
            hint="patch with a static method, such as yarn, for torch.export and torch.jit.trace",
        )
