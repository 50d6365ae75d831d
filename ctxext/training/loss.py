"""The language-model loss without the logits of a whole sequence.

The stock loss holds about four times tokens x vocabulary floats at once: 5 GiB at 8k tokens and 49k entries. Here
the decoder runs once, and the head sees `chunk` hidden states at a time, under activation checkpointing, so that
backward makes a chunk's logits anew. The head is the model's *own* forward with its decoder answering the hidden
states already computed: capped, divided, multiplied or biased logits come out as the model makes them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from ..errors import CtxextError
from ..live.head import answering, causal_lm, decoder_of

IGNORE = -100
CHUNK = 256


def bind(model: nn.Module, chunk: int = CHUNK) -> None:
    """Give `model` (PEFT-wrapped or not) the chunked loss, on the instance only; `release` undoes it.

    A call without labels is the stock forward. With labels the answer holds the loss alone, equal to the stock
    one, `num_items_in_batch` included. Raises CtxextError if this model's loss isn't that of its head and labels
    alone, or comes out otherwise on a short sample.
    """
    base: Any = causal_lm(model)
    decoder_of(base)
    if "forward" in base.__dict__:
        raise CtxextError(f"the forward of this {type(base).__name__} is wrapped already")
    if getattr(base.loss_function, "__name__", "") != "ForCausalLMLoss":
        raise CtxextError(f"{type(base).__name__} has a loss of its own", hint="set train.loss: stock")
    if getattr(base.config, "output_router_logits", False):
        raise CtxextError("the router loss of experts isn't part of the chunked one", hint="set train.loss: stock")
    stock = base.forward
    head = base.get_output_embeddings()
    if isinstance(head, FSDPModule):
        # A head that is sharded by itself would be freed between one chunk's backward and the next's.
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)

    def with_chunks_of(size: int) -> Any:
        return functools.wraps(stock)(functools.partial(_forward, base, stock, size))

    real = not next(base.parameters()).is_meta
    want = _sample(base) if real else 0.0
    base.forward = with_chunks_of(7)  # 16 tokens are two chunks and a rest
    try:
        got = _sample(base) if real else 0.0
    finally:
        del base.forward
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in base.parameters())
    if not abs(want - got) <= (2e-2 if low else 1e-4) * max(1.0, want):
        raise CtxextError(
            f"the chunked loss of {type(base).__name__} is {got:.6g}, the stock one {want:.6g}",
            hint="set train.loss: stock, and report the architecture",
        )
    base.forward = with_chunks_of(chunk)


def release(model: nn.Module) -> None:
    """The stock loss again."""
    del causal_lm(model).forward


def _forward(base: nn.Module, stock: Any, chunk: int, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
    if labels is None:
        return stock(*args, **kwargs)
    items = kwargs.pop("num_items_in_batch", None)
    shifted = kwargs.pop("shift_labels", None)
    seen: list[Any] = []
    decoder = decoder_of(base)
    handle = decoder.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        # The whole forward, for what it does around the decoder; its own head sees one row.
        answer = stock(*args, **{**kwargs, "use_cache": False, "logits_to_keep": 1, "return_dict": True})
    finally:
        handle.remove()
    hidden = seen[-1].last_hidden_state
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=IGNORE)[..., 1:]
    targets = shifted.reshape(-1).to(hidden.device)
    rows = hidden.reshape(-1, hidden.shape[-1])
    total = rows.new_zeros((), dtype=torch.float32)
    for start in range(0, len(rows), chunk):
        part = (rows[start : start + chunk], targets[start : start + chunk])
        if torch.is_grad_enabled():
            total = total + checkpoint(_part, base, stock, type(seen[-1]), *part, use_reentrant=False)
        else:
            total = total + _part(base, stock, type(seen[-1]), *part)
    if items is None:
        items = (targets != IGNORE).sum()
    elif torch.is_tensor(items):
        items = items.to(total.device)
    return type(answer)(loss=total / items)


def _part(base: nn.Module, stock: Any, kind: type, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy of some rows, (rows, hidden), in float32."""
    with answering(decoder_of(base), kind(last_hidden_state=rows[None])):
        ids = torch.zeros(1, len(rows), dtype=torch.long, device=rows.device)
        logits = stock(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def _sample(base: Any) -> float:
    """The loss of 16 tokens, in evaluation mode."""
    ids = torch.arange(16, device=base.device)[None] % base.config.get_text_config().vocab_size
    low = [p.dtype for p in base.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    training = [m for m in base.modules() if m.training]
    base.eval()
    try:
        # Trained weights are float32 beside a low-precision base: such a model runs under autocast only.
        with torch.autocast(base.device.type, low[0] if low else torch.bfloat16, enabled=bool(low)):
            return float(base(input_ids=ids, labels=ids, use_cache=False).loss)
    finally:
        for module in training:
            module.training = True
