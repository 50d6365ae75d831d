"""Pico models under encodings beyond frequencies: the methods of their invariants matrix."""

import torch
from conftest import pico_model

import ctxext

METHODS = {
    "alibi": {},
    "t5_bias": {"buckets": 16, "max_distance": 100},
    "sinusoidal": {"scale": 0.5},
    "nope": {"every": 2},
    "drope": {"temperature": 0.3},
    "self_extend": {"window": 16, "group": 6},
    "rerope": {"window": 24},
    "rerope leaky": {"window": 24, "step": 8},
    "dual_chunk": {"chunk": 40, "window": 10},
}


def patched(method, model=None, **changes):
    """A two-layer pico model that runs `method` at 4 times its 64 tokens; what is learned gets random values."""
    model = pico_model(num_hidden_layers=2, **changes) if model is None else model
    ctxext.patch(model, method.split()[0], 4, **METHODS[method])
    for name, parameter in model.named_parameters():
        if "ctxext_" in name:
            with torch.no_grad():
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return model
