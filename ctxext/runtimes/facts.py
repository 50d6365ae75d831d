"""The data behind `portability`: which runtime does what with which form of rope in config.json.

RULES is read from top to bottom, the first rule of a runtime whose features are all there answers; none: exact.
A feature is a word that `portability.features` finds in a config. Evidence: "run", the runtime's own code was
executed and compared with transformers (for vLLM and SGLang their rope modules on a CPU, not their servers; see
experiments.serving.ropes and llama_cpp); "source", its code was read and nothing of it was run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """A program that runs model folders. command: how to serve {folder} up to {length} tokens."""

    name: str
    version: str
    evidence: str
    command: str


@dataclass(frozen=True)
class Rule:
    """What one runtime does with a config that has all of these features."""

    runtime: str
    features: frozenset[str]
    runs: str
    note: str
    evidence: str


RUNTIMES = (
    Runtime("transformers", "5.24", "run", 'AutoModelForCausalLM.from_pretrained("{folder}")'),
    Runtime("vLLM", "0.33.0", "run", "vllm serve {folder} --max-model-len {length}"),
    Runtime(
        "SGLang",
        "0.5.23",
        "run",
        "python -m sglang.launch_server --model-path {folder} --context-length {length}",
    ),
    Runtime(
        "llama.cpp (ctxext export)",
        "llama-cpp-python 0.3.36",
        "run",
        "ctxext export {folder} --to gguf -o model.gguf && llama-server -m model.gguf -c {length}",
    ),
    Runtime(
        "llama.cpp (its own converter)",
        "llama-cpp-python 0.3.36",
        "run",
        "python convert_hf_to_gguf.py {folder} --outfile model.gguf && llama-server -m model.gguf -c {length}",
    ),
    Runtime("MLX-LM", "2026-08", "source", "mlx_lm.server --model {folder}"),
    Runtime("ExLlamaV3", "2026-08", "source", "max_seq_len: {length} in tabbyAPI's config.yml"),
    Runtime(
        "TGI", "2026-08", "source", "text-generation-launcher --model-id {folder} --max-total-tokens {length}"
    ),
    Runtime(
        "Ollama (import of a folder)",
        "2026-08",
        "source",
        "ollama create NAME with FROM {folder} and PARAMETER num_ctx {length}",
    ),
)


def _rule(runtime: str, features: str, runs: str, note: str, evidence: str) -> Rule:
    return Rule(runtime, frozenset(features.split("+")), runs, note, evidence)


_KEY_ERROR = "stops with a KeyError; load with ctxext.load"
_UNKNOWN = "knows no such rope type; a runtime that ignores unknown types would misread it"
_USE_EXPORT = "use `ctxext export --to gguf`"
_STILL = "nobody looked at layers that don't rotate"
_OTHER_FAMILY = "known for Llama, Mistral and Qwen only"
_NESTED = "known for one rope for all layers only"
_V4_KEYS = "reads rope_theta and rope_scaling only, which are missing: runs theta 10000 without scaling"

RULES = (
    _rule("transformers", "staged", "refused", _KEY_ERROR, "run"),
    _rule(
        "transformers",
        "dynamic",
        "misread",
        "scales by the length of the call: keys in the cache keep the old angles",
        "run",
    ),
    _rule(
        "transformers",
        "longrope+switching",
        "misread",
        "switches by the length of the call: keys in the cache keep the old angles",
        "run",
    ),
    _rule("vLLM", "still layers", "exact", "by its Transformers backend", "source"),
    _rule("vLLM", "staged", "refused", "ValueError: knows no such rope type", "run"),
    _rule(
        "vLLM",
        "dynamic",
        "misread",
        "no scaling at all, and a table shorter than the length that it advertises",
        "run",
    ),
    _rule("vLLM", "linear+whole factor", "refused", "TypeError: the factor is written as an integer", "run"),
    _rule(
        "vLLM",
        "yarn+table too short",
        "refused",
        "its table has original length x factor rows, fewer than max_position_embeddings",
        "run",
    ),
    _rule(
        "vLLM",
        "longrope+switching",
        "approximates",
        "the long list for every text if --max-model-len is above the original length, else the short one",
        "run",
    ),
    _rule(
        "vLLM",
        "longrope+scale not in the formula+no mscale keys",
        "misread",
        "ignores attention_factor: needs short_mscale and long_mscale",
        "run",
    ),
    _rule(
        "vLLM",
        "linear+scaled length",
        "exact",
        "pass --max-model-len: by default it multiplies max_position_embeddings by the factor again",
        "run",
    ),
    _rule("vLLM", "per layer type", "unchecked", _NESTED, "source"),
    _rule("SGLang", "still layers", "unchecked", _STILL, "source"),
    _rule("SGLang", "staged", "refused", _UNKNOWN, "source"),
    _rule("SGLang", "dynamic", "approximates", "static NTK at the largest length, for every text", "run"),
    _rule("SGLang", "linear+whole factor", "refused", "TypeError: the factor is written as an integer", "run"),
    _rule(
        "SGLang",
        "longrope+switching",
        "misread",
        "switches per forward batch: the other texts in it change the answer",
        "run",
    ),
    _rule(
        "SGLang",
        "yarn+own scale+no attn_factor",
        "misread",
        "ignores attention_factor: needs attn_factor, its ratio to 0.1 ln s + 1",
        "run",
    ),
    _rule(
        "SGLang",
        "longrope+scale not in the formula+no mscale keys",
        "misread",
        "ignores attention_factor: needs short_mscale and long_mscale",
        "run",
    ),
    _rule("SGLang", "per layer type", "unchecked", _NESTED, "source"),
    _rule(
        "llama.cpp (ctxext export)",
        "staged",
        "refused",
        "a GGUF says one table; --fallback static writes the last stage, if one comes near",
        "run",
    ),
    _rule(
        "llama.cpp (ctxext export)",
        "dynamic",
        "refused",
        "has no fixed frequencies to write; patch it anew",
        "run",
    ),
    _rule(
        "llama.cpp (ctxext export)",
        "longrope+switching",
        "refused",
        "patch it with `ctxext patch --existing replace` and one list",
        "run",
    ),
    _rule(
        "llama.cpp (ctxext export)",
        "other family",
        "refused",
        "ctxext writes Llama, Mistral, Qwen2 and Qwen3 only; convert, then `ctxext patch x.gguf --in-gguf`",
        "run",
    ),
    _rule(
        "llama.cpp (ctxext export)",
        "no gguf table",
        "refused",
        "llama.cpp reads no frequency table for this family; pi, ntk, theta and yarn's defaults need none",
        "run",
    ),
    _rule(
        "llama.cpp (its own converter)",
        "staged",
        "misread",
        f"warns and writes a file without scaling; {_USE_EXPORT}",
        "source",
    ),
    _rule(
        "llama.cpp (its own converter)",
        "dynamic",
        "misread",
        f"writes a file without scaling; {_USE_EXPORT}",
        "source",
    ),
    _rule(
        "llama.cpp (its own converter)",
        "longrope",
        "misread",
        f"writes the type and drops the factors; {_USE_EXPORT}",
        "run",
    ),
    _rule(
        "llama.cpp (its own converter)",
        "yarn+own ramp",
        "misread",
        f"llama.cpp reads no betas and no truncate from a Llama's file; {_USE_EXPORT}",
        "run",
    ),
    _rule(
        "llama.cpp (its own converter)",
        "yarn+own scale",
        "misread",
        f"llama.cpp overwrites the attention factor of the file; {_USE_EXPORT}",
        "run",
    ),
    _rule(
        "llama.cpp (its own converter)",
        "still layers+not every fourth",
        "misread",
        "its SmolLM3 stops every fourth layer, whatever the config says",
        "source",
    ),
    _rule("llama.cpp (its own converter)", "still layers", "exact", "as SmolLM3", "source"),
    _rule("llama.cpp (its own converter)", "other family", "unchecked", _OTHER_FAMILY, "source"),
    _rule("MLX-LM", "still layers", "exact", "as SmolLM3", "source"),
    _rule("MLX-LM", "staged", "refused", _UNKNOWN, "source"),
    _rule("MLX-LM", "no v4 keys", "misread", _V4_KEYS, "source"),
    _rule("MLX-LM", "dynamic", "misread", "scales per call: keys in the cache keep the old angles", "source"),
    _rule("MLX-LM", "longrope+switching", "approximates", "the long list for every text", "source"),
    _rule("MLX-LM", "yarn+own scale", "misread", "ignores attention_factor; patch with --target mlx", "source"),
    _rule("MLX-LM", "yarn+no truncate", "misread", "ignores truncate; patch with --target mlx", "source"),
    _rule(
        "MLX-LM",
        "longrope+scale not in the formula",
        "misread",
        "derives the attention scale from the two lengths alone",
        "source",
    ),
    _rule("MLX-LM", "other family", "unchecked", _OTHER_FAMILY, "source"),
    _rule("ExLlamaV3", "staged", "refused", _UNKNOWN, "source"),
    _rule("ExLlamaV3", "dynamic", "refused", "ValueError: knows no dynamic scaling", "source"),
    _rule(
        "ExLlamaV3",
        "yarn+factor is not the ratio",
        "misread",
        "takes max_position_embeddings / original length for the factor",
        "source",
    ),
    _rule(
        "ExLlamaV3",
        "longrope+switching",
        "approximates",
        "the long list for every text if max_position_embeddings is above the original length",
        "source",
    ),
    _rule(
        "ExLlamaV3",
        "longrope+scale not in the formula",
        "misread",
        "derives the attention scale from the two lengths alone",
        "source",
    ),
    _rule("ExLlamaV3", "other family", "unchecked", _OTHER_FAMILY, "source"),
    _rule("TGI", "staged", "refused", _UNKNOWN, "source"),
    _rule("TGI", "no v4 keys", "misread", _V4_KEYS, "source"),
    _rule("TGI", "linear", "misread", "accepts linear scaling and ignores the factor", "source"),
    _rule("TGI", "dynamic", "misread", "keeps the largest scale from one request to the next", "source"),
    _rule("TGI", "yarn+own ramp", "misread", "takes beta 32 and 1 always", "source"),
    _rule("TGI", "yarn+own scale", "misread", "ignores attention_factor", "source"),
    _rule(
        "TGI",
        "longrope+no original at the top",
        "refused",
        "needs original_max_position_embeddings at the top of config.json",
        "source",
    ),
    _rule("TGI", "other family", "unchecked", _OTHER_FAMILY, "source"),
    _rule("Ollama (import of a folder)", "no v4 keys", "misread", _V4_KEYS, "source"),
    *(
        _rule(
            "Ollama (import of a folder)",
            kind,
            "misread",
            f"drops the scaling; {_USE_EXPORT} and import that (its Go engine ignores the attention scale)",
            "source",
        )
        for kind in ("staged", "dynamic", "yarn", "longrope")
    ),
    _rule("Ollama (import of a folder)", "other family", "unchecked", _OTHER_FAMILY, "source"),
)
