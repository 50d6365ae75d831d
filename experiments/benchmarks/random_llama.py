"""A Llama with random weights, for what depends on shapes alone."""

from __future__ import annotations

from typing import Any


def random_llama(hidden: int, layers: int, heads: int, vocabulary: int, trained: int, **changes: Any) -> Any:
    """In eval mode and float32, from seed 0; twice as wide inside its MLP, tied unless `changes` say otherwise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    keys = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": trained,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**keys, **changes})).eval()
