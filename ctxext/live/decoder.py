"""A model's own head, applied to hidden states that are known already.

Architectures cap logits (Gemma 2), divide them (Granite), multiply them (Cohere) or scale the hidden states before
(MiniCPM). So no head is applied by hand here: the model's *own* forward runs, and its decoder answers the hidden
states. The evaluators score, and the trainer's loss sees, a few hundred rows at a time this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import CtxextError


def causal_lm(model: nn.Module) -> nn.Module:
    """The model with a language-model head inside `model`; PEFT wrappers are looked through."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: nn.Module) -> nn.Module:
    """The module whose output is the hidden states that the head reads.

    Raises CtxextError if there is none beneath a head.
    """
    base = causal_lm(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if decoder is base:
        decoder = getattr(base, "model", None)  # Llama 4's text model answers itself
    if decoder is None or base.get_output_embeddings() is None:
        raise CtxextError(
            f"{type(base).__name__} has no decoder beneath a language-model head",
            hint="load the model with AutoModelForCausalLM",
        )
    return decoder


@contextmanager
def answering(decoder: nn.Module, answer: Any) -> Iterator[None]:
    """While this holds, `decoder` computes nothing and returns `answer`. Only the instance changes."""
    own = decoder.__dict__.get("forward")  # accelerate and others hang a wrapper on the instance
    decoder.forward = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
