"""Sliding-window perplexity, for comparison with published tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch

from ..errors import UsageError
from ..live.head import CHUNK, token_nll
from ..terminal import progress
from . import Aggregation
from .stats import perplexity


def sliding_window(
    model,
    docs_ids: Sequence[Sequence[int]],
    window: int,
    stride: int = 256,
    *,
    bos: int | None = None,
    aggregation: Aggregation = "token",
    truncate: bool = False,
    chunk: int | None = CHUNK,
    description: str = "sliding window",
) -> dict:
    """Sliding-window perplexity exactly as YaRN's `eval/perplexity.py` (Peng et al., 2023) defines it.

    Windows of `window` tokens, BOS included and in front of each one, move by `stride` over each document; the
    first scores all its tokens, the others the ones that are new. `truncate` cuts each document to its first
    window: that is how the published long curves were made, and then nothing slides.

    aggregation="window" is YaRN's: the mean over windows of each window's mean, so a first window of thousands of
    tokens weighs as much as one of `stride`. "token" weighs tokens equally; use it unless you reproduce YaRN.

    Returns {"window", "stride", "aggregation", "truncate", "documents", "windows", "tokens", "nll", "ppl"}.
    """
    if aggregation not in get_args(Aggregation):
        raise UsageError(f"aggregation must be one of {', '.join(get_args(Aggregation))}, not {aggregation!r}")
    width = window if bos is None else window - 1
    step = width if truncate else stride
    if not 1 <= step <= width or window < 2:
        raise UsageError(f"stride must be from 1 to {width} for a window of {window}, not {step}")
    means, total, tokens = [], 0.0, 0
    for index, document in enumerate(progress(docs_ids, description, total=len(docs_ids))):
        ids = torch.tensor(document[:width] if truncate else document, dtype=torch.long)
        if len(ids) < (2 if bos is None else 1):
            raise UsageError(f"document {index} has {len(ids)} tokens: nothing to score")
        previous = 0
        for begin in range(0, len(ids), step):
            end = min(begin + width, len(ids))
            row = ids[begin:end] if bos is None else torch.cat([torch.tensor([bos]), ids[begin:end]])
            # Without BOS the first token of the first window has nothing before it.
            scored = min(end - previous, len(row) - 1)
            if scored:
                nll = token_nll(model, row, last=scored, chunk=chunk).double()
                means.append(float(nll.mean()))
                total, tokens = total + float(nll.sum()), tokens + scored
            previous = end
            if end == len(ids):
                break
    if not tokens:
        raise UsageError("no documents to measure")
    nll = sum(means) / len(means) if aggregation == "window" else total / tokens
    return {
        "window": window,
        "stride": step,
        "aggregation": aggregation,
        "truncate": truncate,
        "documents": len(docs_ids),
        "windows": len(means),
        "tokens": tokens,
        "nll": nll,
        "ppl": perplexity(nll),
    }
