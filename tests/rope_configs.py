"""A config.json in each dialect, and the options that a method can't do without."""

from ctxext import methods

V4 = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "unknown_key": {"kept": True},
}
V5 = {k: v for k, v in V4.items() if k not in ("rope_theta", "rope_scaling")} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}
}


def options(name, rope):
    return {"long_factor": [1 + i / 8 for i in range(rope.size)]} if methods.get(name).needs else {}
