"""What a folder's model is for: the class of transformers that loads it with its own head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config.architectures import architectures
from ..errors import CtxextError

CAUSAL = "AutoModelForCausalLM"


def auto_class(config: Mapping[str, Any]) -> str:
    """The name of the auto class of transformers that loads what `architectures` in a config.json names.

    AutoModel for an embedding model (MistralModel), AutoModelForSequenceClassification for a reward model, and so
    on; AutoModelForCausalLM where nothing is named. Whether there is such a class isn't asked.
    """
    name = (architectures(config) or [""])[0]
    for auto, place in (config.get("auto_map") or {}).items():
        own = str(place).rpartition(".")[2]
        if auto.startswith("AutoModel") and own and name.endswith(own):
            return auto
    head = re.search(r"For[A-Z](?:(?!For[A-Z]).)*$", name)
    if head:
        return f"AutoModel{head.group()}"
    return "AutoModel" if name.endswith("Model") else CAUSAL


def require_causal(config: Mapping[str, Any], where: Any, what: str) -> None:
    """Raise CtxextError unless the model predicts next tokens. where: its folder. what: needs that it does."""
    found = auto_class(config)
    # The class of a model with a vision part, whose text model predicts tokens too.
    if found in (CAUSAL, "AutoModelForConditionalGeneration"):
        return
    name = architectures(config)[0]
    raise CtxextError(
        f"{what} needs a model that predicts next tokens, {where} holds a {name} ({found})",
        hint="give the language model that it was made from",
    )
