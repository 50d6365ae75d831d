"""Scoring with a KV cache: prompts that begin alike share their prefill, and long texts are read in pieces.

Both are right only for a causal model: the keys of a prefix must not depend on what follows. Stock `dynamic` and
two-table `longrope` break that (their cached keys keep the angles of a shorter call: whole nats on a small model),
so they are refused. Staged schedules of ctxext are causal by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import ctxext

from ..config.families import SCALED_LAYERS
from ..errors import CtxextError, UsageError
from ..live.head import CHUNK, TokenScores, cache_argument, collect, inference, row_logits
from ..needles.exact_length import common_prefix

BLOCK = 512
"""Tokens per call after the first. With keys in the cache SDPA gets an explicit mask and works on masked pairs
too, so one long call would pay for the whole rectangle instead of the triangle."""


def length_dependent(model) -> str | None:
    """Why a score at position i depends on what follows it in this model, or None if it doesn't.

    Stock `dynamic` chooses its frequencies, and stock `longrope` between two tables, from the length of the call.
    A schedule that ctxext runs never does, whatever the config's keys say for other runtimes. `model` may be a
    config too.
    """
    config = getattr(model, "config", model)
    if isinstance(model, torch.nn.Module) and _runs_ctxext(model):
        return None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        kind = entry.get("rope_type")
        if kind == "dynamic":
            return "its rope_type is 'dynamic': the frequencies follow the length of the call"
        if kind == "longrope" and list(entry.get("short_factor", [])) != list(entry.get("long_factor", [])):
            return "its rope_type is 'longrope' with two tables: the length of the call chooses one"
    return None


def _runs_ctxext(model) -> bool:
    try:
        return ctxext.schedule_of(model) is not None
    except CtxextError:  # no rotary that ctxext knows: GPT-2, a stub
        return False


def why_not(model) -> str | None:
    """Why this model can't reuse the keys of a prefix, or None if it can."""
    reason = length_dependent(model)
    if reason:
        return reason
    if cache_argument(model) is None:
        return f"{type(model).__name__}.forward takes no cache"
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {SCALED_LAYERS}
    if kinds or getattr(model.config, "sliding_window", None):
        return "its layers don't keep all keys, so a cache can't be cut back"
    return None


class PrefixScorer:
    """Scores sequences one after the other, running only what comes after the prefix shared with the one before.

    Raises CtxextError for a model whose keys can't be reused (see `why_not`).
    """

    def __init__(self, model, *, chunk: int | None = CHUNK, block: int = BLOCK):
        reason = why_not(model)
        if reason:
            raise CtxextError(f"prefixes can't be shared with this model: {reason}", hint="turn reuse off")
        self.model, self.chunk, self.block = model, chunk, block
        self.tokens_run = 0
        """Tokens that went through the model so far: what reuse saved shows here."""
        self._ids: list[int] = []
        self._cache = None

    def scores(self, ids: Sequence[int], positions: Sequence[int]) -> TokenScores:
        """`head.token_scores` of one sequence: [1, n] tensors for the tokens at `positions` (ascending, from
        1)."""
        ids = list(ids)
        if not positions or positions[0] < 1 or positions[-1] >= len(ids):
            raise UsageError(f"positions must lie in 1..{len(ids) - 1}")
        rows = [place - 1 for place in positions]
        # The row before the first target must run again: its hidden state wasn't kept. One token more keeps the
        # call from being empty when nothing else is new.
        start = min(common_prefix(self._ids, ids), rows[0], len(ids) - 1)
        with inference(self.model):
            self._cut(start)
            # Blocks end before the scored rows, so that one call holds all of these.
            while start and rows[0] - start > self.block:
                self._extend(ids[start : start + self.block])
                start += self.block
            where = torch.tensor([row - start for row in rows])
            logits = row_logits(self.model, torch.tensor([ids[start:]]), where, self.chunk, self._cache)
            columns = collect(logits, torch.tensor([ids[place] for place in positions]))
            self.tokens_run += len(ids) - start
        self._ids = ids
        return TokenScores(*(column[None] for column in columns))

    def _extend(self, ids: Sequence[int]) -> None:
        """Put ids into the cache, unscored."""
        batch = torch.tensor([list(ids)], device=self.model.device)
        cache: dict[Any, Any] = {cache_argument(self.model): self._cache}
        self.model(input_ids=batch, use_cache=True, logits_to_keep=1, **cache)
        self.tokens_run += len(ids)

    def _cut(self, length: int) -> None:
        """Keep the first `length` tokens of the cache."""
        if length == 0 or self._cache is None:
            self._cache = DynamicCache(config=self.model.config)
            return
        if not all(isinstance(layer, DynamicLayer) for layer in self._cache.layers):
            raise CtxextError("this model's cache can't be cut back", hint="turn reuse off")
        surplus = self._cache.get_seq_length() - length
        if surplus:
            self._cache.crop(-surplus)


def chunked_nll(model, input_ids, prefill: int, *, chunk: int | None = CHUNK) -> torch.Tensor:
    """`head.token_nll` of one sequence [T], read `prefill` tokens at a time with a KV cache: float32 [T-1].

    For texts whose activations don't fit in one pass. Slower where they do, since attention gets explicit masks.
    Raises CtxextError for a model whose keys depend on the length of the call.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.long)
    if ids.dim() != 1 or len(ids) < 2 or prefill < 1:
        raise UsageError(f"chunked scoring needs [T] ids with T >= 2 and pieces of at least 1, not {prefill}")
    reason = length_dependent(model)
    if reason or cache_argument(model) is None:
        raise CtxextError(
            f"this model can't be read in pieces: {reason or 'its forward takes no cache'}",
            hint="score it in one pass, without chunked prefill",
        )
    cache, nll = DynamicCache(config=model.config), torch.empty(len(ids) - 1)
    with inference(model):
        for start in range(0, len(ids) - 1, prefill):
            piece = ids[start : min(start + prefill, len(ids) - 1)]
            targets = ids[start + 1 : start + 1 + len(piece)]
            done = 0
            for logits in row_logits(model, piece[None], torch.arange(len(piece)), chunk, cache):
                end = done + logits.shape[0]
                expected = targets[done:end].to(logits.device)
                nll[start + done : start + end] = F.cross_entropy(logits, expected, reduction="none").cpu()
                done = end
    if not torch.isfinite(nll).all():
        raise CtxextError("some scores aren't finite", hint="load the model in float32 or bfloat16")
    return nll
