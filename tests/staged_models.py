"""Pico models under staged schedules, and under the length-dependent types that transformers has itself."""

import torch
from conftest import pico_model
from feeding import TRAINED

import ctxext

SHAPES = {
    "llama-gqa": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    # Heads larger than hidden size / heads, as in the real Qwen3.
    "qwen3-wide-heads": ("qwen3", {"head_dim": 48}),
    "cohere-neighbours": ("cohere", {}),
    "phi-partial": ("phi", {"num_key_value_heads": 4}),
    # The embedded model: trained weights, told that it was trained on 64 tokens.
    "tiny": ("tiny", {}),
}
METHODS = {
    "dynamic_pi": {"granularity": 16},
    "dynamic_ntk": {"granularity": 16},
    "dynamic_yarn": {"granularity": 32, "temperature": 0.2},
    "longrope": {"granularity": 1000},
}


def staged(shape="llama-gqa", method="dynamic_ntk", **more):
    """A pico model under a staged schedule of 4 x 64 tokens."""
    family, changes = SHAPES[shape]
    options = {**METHODS[method], **more}
    if family == "tiny":
        model = ctxext.load("tiny", dtype=torch.float32).eval()
        options["trained_length"] = TRAINED
    else:
        model = pico_model(family, **changes)
    if method == "longrope":
        size = model.base_model.rotary_emb.inv_freq.numel()
        options = {"short_factor": [1.0] * size, "long_factor": [1 + 3 * i / size for i in range(size)], **more}
    schedule = ctxext.patch(model, method, 4, **options)
    assert len(schedule.stages) > 1
    return model


def stock(kind):
    """The same model under transformers' own length-dependent types."""
    keys = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    changes = {"rope_parameters": keys}
    if kind == "longrope":
        keys |= {"short_factor": [1.0] * 16, "long_factor": [1 + 3 * i / 16 for i in range(16)]}
        keys |= {"original_max_position_embeddings": TRAINED}
        changes["max_position_embeddings"] = 4 * TRAINED
    return pico_model("llama", **changes)
