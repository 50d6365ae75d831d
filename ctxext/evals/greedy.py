"""Greedy continuations, whatever the model's own generation config asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..live.head import inference


def greedy(
    model, rows: Sequence[Sequence[int]], tokens: int, stop: StoppingCriteria | None = None
) -> list[list[int]]:
    """At most `tokens` tokens that follow each of equally long prompts; all sampling options are overridden.

    `stop` may end a row earlier; it sees prompt and continuation.
    """
    ids = torch.tensor(rows, device=model.device)
    with inference(model):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([stop] if stop else []),
        )
    return output[:, ids.shape[1] :].tolist()
