"""The loss of documents under a schedule, on a live model, without the logits of whole sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CtxextError
from ..live.patch import apply
from ..rope import Schedule
from ..training.loss import IGNORE, bind
from .documents import Document


class Fitness:
    """Measures schedules on one model. `model` is given the chunked loss of training, which is flat in memory."""

    def __init__(self, model: Any):
        """Raises CtxextError for a model whose losses aren't numbers, or can't be computed in pieces."""
        self.model = model.eval()
        if not math.isfinite(self._loss(Document(tuple(range(1, 17))))):
            raise CtxextError(
                f"the loss of {type(model).__name__} isn't finite even on a few tokens",
                hint="check the weights, or load them in float32 or bfloat16",
            )
        config = model.config.get_text_config()
        # The router's loss of experts is a matter of training; it isn't in a perplexity.
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
        bytes_per_row = 2 * config.vocab_size
        # Just over 32 MiB of logits: smaller blocks stay in the C library's heap and split it.
        try:
            bind(model, max(64, (33 << 20) // bytes_per_row + 1))
        except CtxextError as error:
            raise CtxextError(
                error.message, hint="a search needs losses computed in pieces: report the architecture"
            ) from error
        self._applied: Schedule | None = None

    def __call__(self, schedule: Schedule, documents: Sequence[Document]) -> list[float]:
        """Mean loss in nats over the scored tokens of each document."""
        if schedule != self._applied:
            apply(self.model, schedule)
            self._applied = schedule
        return [self._loss(document) for document in documents]

    @torch.no_grad()
    def _loss(self, document: Document) -> float:
        ids = torch.tensor([document.ids], device=self.model.device)
        labels = ids.clone()
        labels[:, : document.scored_from] = IGNORE
        return float(self.model(input_ids=ids, labels=labels).loss)
