"""Small random models of any family of transformers, for `families`: the sizes that each config class needs."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ctxext.config.families import per_layer_type
from ctxext.config.keys import SCALING_KEYS

TRAINED = 64
_LARGEST = 30_000_000

# Small values for the names that config classes use; each is passed only if the class has it.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "max_position_embeddings": TRAINED,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Wider than any text here: some families need one, and a patch would drop one that is too short.
    "sliding_window": 4096,
    "use_cache": True,
    "attention_dropout": 0.0,
}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
# What single families need beside that to be built small, or to let positions matter.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "mimo_v2_flash": {"head_dim": 48, "v_head_dim": 48},
    "zaya": {"num_experts_per_tok": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "dots1": {"n_shared_experts": 1},
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "qwen4_exp_text": _HYBRID,
    "dots3_note_text": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["full_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [96, 96],
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": TRAINED,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
}


def tiny_config(model_type: str) -> Any:
    """A small config of the family; whatever its class raises for such sizes."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__dataclass_fields__", {}))
    keys = {k: v for k, v in SIZES.items() if k in known} | MORE.get(model_type, {})
    usual = {"sliding_attention", "full_attention"}
    if per_layer_type(model_type) and set(getattr(kind(), "layer_types", None) or ()) <= usual:
        keys["layer_types"] = sorted(usual, reverse=True)
    config = kind(**keys)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type", "default") not in ("default", "proportional"):
        # Families whose class is scaled by default are patched from their original rope.
        kept = {k: v for k, v in rope.items() if k not in SCALING_KEYS}
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"], **kept}
        if "llama_4_scaling_beta" in kept:
            # A temperature by position, which stretched positions would change: off here.
            plain |= {"original_max_position_embeddings": TRAINED, "llama_4_scaling_beta": 0.0}
        config = kind(**keys, rope_parameters=plain)
    return config


def tiny_model(model_type: str) -> Any:
    """A random model of the family in float32, ready to read."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size / 1e6:,.0f}M parameters with the small sizes that are known here")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
