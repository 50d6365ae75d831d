"""How checkpoints say their rope, in the words of their makers' config.json, in both generations of the words.

Only what bears on the rope is here; sizes are small, so that a model can be built from each. `reads` is what the
makers say that the model reads. refused: why ctxext doesn't patch it.
"""

from dataclasses import dataclass, field
from typing import Any

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 32,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Published:
    name: str
    family: str
    reads: int
    keys: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    leaves_out: tuple[str, ...] = ()
    """Sizes that this config.json doesn't spell out."""

    @property
    def config(self) -> dict[str, Any]:
        sizes = {k: v for k, v in SIZES.items() if k not in self.leaves_out}
        return {**sizes, "model_type": self.family, **self.keys}


def _plain(name: str, family: str, reads: int, theta: float, **keys: Any) -> Published:
    left = keys.pop("leaves_out", ())
    said = {"max_position_embeddings": reads, "rope_theta": theta, "rope_scaling": None, **keys}
    return Published(name, family, reads, said, leaves_out=left)


def _scaled(name: str, family: str, reads: int, theta: float, scaling: dict[str, Any], **keys: Any) -> Published:
    refused = keys.pop("refused", None)
    said = {"max_position_embeddings": reads, "rope_theta": theta, "rope_scaling": scaling, **keys}
    return Published(name, family, reads, said, refused)


def _new(name: str, family: str, reads: int, parameters: dict[str, Any], **keys: Any) -> Published:
    refused = keys.pop("refused", None)
    return Published(
        name, family, reads, {"max_position_embeddings": reads, "rope_parameters": parameters, **keys}, refused
    )


def _llama3(factor: float, original: int = 8192) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def _yarn(factor: float, original: int, **keys: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **keys}


LISTS = {
    "short_factor": [1 + i / 64 for i in range(16)],
    "long_factor": [1 + i for i in range(16)],
}
SAME = {"short_factor": LISTS["long_factor"], "long_factor": LISTS["long_factor"]}
MISTRAL3 = {
    **_yarn(16.0, 16384, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    "llama_4_scaling_beta": 0.1,
    "rope_theta": 1e6,
}
SWITCHES = "switches between short and long"

PUBLISHED = [
    # Llama and what is built like it.
    _plain("Llama 2", "llama", 4096, 10000.0),
    _plain("Llama 3", "llama", 8192, 500000.0, leaves_out=("head_dim",)),
    _scaled("Llama 3.1", "llama", 131072, 500000.0, _llama3(8.0)),
    _scaled("Llama 3.2", "llama", 131072, 500000.0, _llama3(32.0)),
    _new("Llama 3.2, saved by transformers 5", "llama", 131072, _llama3(32.0) | {"rope_theta": 500000.0}),
    _scaled("LLaMA-2-7B-32K", "llama", 32768, 10000.0, {"factor": 8.0, "type": "linear"}),
    _scaled(
        "Vicuna 16k",
        "llama",
        16384,
        10000.0,
        {"factor": 4.0, "type": "linear"},
        max_position_embeddings=4096,
        max_sequence_length=16384,
    ),
    _scaled("DeepSeek Coder", "llama", 16384, 100000.0, {"factor": 4.0, "type": "linear"}),
    _scaled(
        "Yarn-Llama-2 64k",
        "llama",
        65536,
        10000.0,
        _yarn(16.0, 4096, finetuned=True),
        max_position_embeddings=4096,
    ),
    _plain("CodeLlama", "llama", 16384, 1e6),
    _plain("Yi 200K", "llama", 200000, 5e6),
    _plain("SmolLM2", "llama", 8192, 100000.0, rope_interleaved=False),
    _plain("Mistral 7B", "mistral", 32768, 1e6, sliding_window=None),
    _plain("Mistral Nemo", "mistral", 131072, 1e6, sliding_window=None),
    _new("Ministral 3", "ministral3", 262144, MISTRAL3),
    _plain("Ministral 8B", "ministral", 32768, 1e8, sliding_window=32768, layer_types=ALTERNATING),
    _plain("Mixtral", "mixtral", 32768, 1e6, sliding_window=None, **EXPERTS),
    # Qwen.
    _plain(
        "Qwen2.5", "qwen2", 32768, 1e6, use_sliding_window=False, sliding_window=131072, leaves_out=("head_dim",)
    ),
    _scaled(
        "Qwen2.5 as its card says for long text",
        "qwen2",
        131072,
        1e6,
        _yarn(4.0, 32768),
        max_position_embeddings=32768,
    ),
    _plain("Qwen3", "qwen3", 40960, 1e6, use_sliding_window=False, sliding_window=None),
    _scaled(
        "Qwen3 as its card says for long text",
        "qwen3",
        131072,
        1e6,
        _yarn(4.0, 32768),
        max_position_embeddings=40960,
    ),
    _plain("Qwen3, without head_dim", "qwen3", 40960, 1e6, leaves_out=("head_dim",)),
    _plain("Qwen2 MoE", "qwen2_moe", 32768, 1e6, shared_expert_intermediate_size=32, **EXPERTS),
    _plain("Qwen3 MoE 2507", "qwen3_moe", 262144, 1e7, **EXPERTS),
    # Phi.
    _plain("Phi-2", "phi", 2048, 10000.0, partial_rotary_factor=0.4, head_dim=80, hidden_size=320),
    _plain("Phi-3 mini 4k", "phi3", 4096, 10000.0, original_max_position_embeddings=4096, sliding_window=None),
    _scaled(
        "Phi-3 mini 128k",
        "phi3",
        131072,
        10000.0,
        {"type": "longrope", **LISTS},
        original_max_position_embeddings=4096,
        sliding_window=None,
        refused=SWITCHES,
    ),
    _scaled(
        "Phi-3 of its first weeks",
        "phi3",
        131072,
        10000.0,
        {"type": "su", **LISTS},
        original_max_position_embeddings=4096,
        sliding_window=None,
        refused=SWITCHES,
    ),
    _plain("Phi-4", "phi3", 16384, 250000.0, original_max_position_embeddings=16384, sliding_window=None),
    _scaled(
        "MiniCPM 4",
        "llama",
        32768,
        10000.0,
        {"rope_type": "longrope", **SAME, "original_max_position_embeddings": 32768},
    ),
    # Gemma.
    _plain("Gemma", "gemma", 8192, 10000.0),
    _plain("Gemma 2", "gemma2", 8192, 10000.0, sliding_window=4096, layer_types=ALTERNATING),
    _new(
        "Gemma 3 4B text",
        "gemma3_text",
        131072,
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        layer_types=ALTERNATING,
        sliding_window=1024,
    ),
    _scaled(
        "Gemma 3 4B text, transformers 4",
        "gemma3_text",
        131072,
        1e6,
        {"rope_type": "linear", "factor": 8.0},
        rope_local_base_freq=10000.0,
        layer_types=ALTERNATING,
        sliding_window=1024,
    ),
    _plain(
        "Gemma 3 1B",
        "gemma3_text",
        32768,
        1e6,
        rope_local_base_freq=10000.0,
        layer_types=ALTERNATING,
        sliding_window=512,
    ),
    # Trained with a scaling.
    _scaled(
        "gpt-oss",
        "gpt_oss",
        131072,
        150000.0,
        _yarn(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
        layer_types=ALTERNATING,
        sliding_window=128,
        initial_context_length=4096,
        **EXPERTS,
    ),
    _scaled(
        "OLMo 3",
        "olmo3",
        65536,
        500000.0,
        _yarn(8.0, 8192, beta_fast=32, beta_slow=1, attention_factor=1.2079441541679836),
        layer_types=ALTERNATING,
        sliding_window=4096,
    ),
    _scaled("EXAONE 3.5", "llama", 32768, 1e6, _llama3(8.0)),
    _scaled(
        "EXAONE 4 32B",
        "exaone4",
        131072,
        1e6,
        _llama3(16.0),
        layer_types=["full_attention"] * 2,
        sliding_window=None,
    ),
    _scaled("Apertus", "apertus", 65536, 12e6, _llama3(8.0)),
    _scaled("SmolLM3 as its card says", "smollm3", 131072, 5e6, _yarn(2.0, 65536), max_position_embeddings=65536),
    _plain("SmolLM3", "smollm3", 65536, 5e6, no_rope_layers=[1, 0]),
    _scaled(
        "HunYuan dense",
        "hunyuan_v1_dense",
        32768,
        10000.0,
        {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    _scaled(
        "HunYuan MoE",
        "hunyuan_v1_moe",
        32768,
        10000.0,
        {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        **{**EXPERTS, "num_experts": 4, "moe_topk": 2},
    ),
    _scaled("InternLM2 as a Llama", "llama", 32768, 1e6, {"type": "dynamic", "factor": 2.0}),
    # Rotating a part of each head.
    _plain("GLM-4 9B", "glm", 131072, 10000.0, partial_rotary_factor=0.5),
    _plain("GLM-4 0414", "glm4", 32768, 10000.0, partial_rotary_factor=0.5),
    _plain("StableLM 2", "stablelm", 4096, 10000.0, partial_rotary_factor=0.25),
    _plain("Nemotron 4", "nemotron", 4096, 10000.0, partial_rotary_factor=0.5),
    Published(
        "Pythia",
        "gpt_neox",
        2048,
        {"max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000},
        leaves_out=("head_dim", "num_key_value_heads"),
    ),
    _plain("Persimmon", "persimmon", 16384, 25000.0, partial_rotary_factor=0.5, leaves_out=("head_dim",)),
    # Others with a plain rope.
    _plain("Command R", "cohere", 131072, 8e6, leaves_out=("head_dim",)),
    _plain("Falcon 3, a Llama", "llama", 32768, 1000042.0),
    _plain("Falcon H1-like length", "falcon", 2048, 10000.0, alibi=False, leaves_out=("head_dim",)),
    _plain("StarCoder2", "starcoder2", 16384, 1e5, sliding_window=None, leaves_out=("head_dim",)),
    _plain("Granite 3.3", "granite", 131072, 1e7, leaves_out=("head_dim",)),
    _plain("Granite 3 MoE", "granitemoe", 4096, 10000.0, leaves_out=("head_dim",), **EXPERTS),
    _plain("OLMo", "olmo", 2048, 10000.0, leaves_out=("head_dim",)),
    _plain("OLMo 2", "olmo2", 4096, 500000.0, leaves_out=("head_dim",)),
    _plain("OLMoE", "olmoe", 4096, 10000.0, leaves_out=("head_dim",), **EXPERTS),
    _plain("ERNIE 4.5", "ernie4_5", 131072, 500000.0),
    _plain("Seed-OSS", "seed_oss", 524288, 1e7),
    _plain("Helium", "helium", 4096, 100000.0),
    _plain("Arcee AFM before its extension", "arcee", 4096, 10000.0),
    # Less than its scaling provides for stands there; servers take the product, as for Qwen's.
    _scaled("Arcee AFM", "arcee", 81920, 10000.0, _yarn(20.0, 4096, mscale=1.0), max_position_embeddings=65536),
    _plain("Aria's text model", "aria_text", 65536, 5e6, moe_num_experts=4),
    _plain("Bitnet", "bitnet", 4096, 500000.0, leaves_out=("head_dim",)),
    _plain("Diffllama", "diffllama", 2048, 10000.0),
    _plain(
        "Dots.llm1",
        "dots1",
        32768,
        1e7,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **EXPERTS,
    ),
    _plain("CWM", "cwm", 131072, 1e6, layer_types=ALTERNATING, sliding_window=8192),
    _plain("InternLM 3", "internlm3", 32768, 5e7),
    _plain("Ling-like MiniMax text", "minimax", 10240000, 1e7, layer_types=["full_attention"] * 2, **EXPERTS),
    _plain("VaultGemma", "vaultgemma", 1024, 10000.0, sliding_window=512, layer_types=ALTERNATING),
    # A switch of the family's own says that there is no rope.
    Published(
        "Granite 4 H",
        "granitemoehybrid",
        131072,
        {
            "max_position_embeddings": 131072,
            "rope_theta": 10000,
            "position_embedding_type": "nope",
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            **MAMBA,
        },
        refused="switches the rotary embedding off",
        leaves_out=("head_dim",),
    ),
]
