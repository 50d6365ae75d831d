"""Folders broken in the ways that people report, made from a good one, with the check that finds each."""

import json
import shutil

from conftest import logits, pico_model

import ctxext

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LISTS = {"short_factor": [2.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}


def plain_folder(folder):
    """A pico Llama as transformers 4 saved it: theta 500000 at the top, no scaling."""
    pico_model(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 500000.0, "rope_scaling": None}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    (folder / "generation_config.json").write_text("{}")
    return folder


def variant(plain, tmp_path, config=None, drop=(), **files):
    """A copy with other keys in config.json, and other files."""
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    found = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if k not in drop}))
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def scaled(length=256, **keys):
    return {"rope_scaling": keys, "max_position_embeddings": length}


# name: (changed config, dropped keys, other files, the check, the method that the mended folder runs at factor 4)
BROKEN = {
    "transformers 5 saved it: rope_parameters alone": (
        {"rope_parameters": {**YARN, "rope_theta": 5e5}, "max_position_embeddings": 256},
        ("rope_theta", "rope_scaling"),
        {},
        "new_dialect_alone",
        "yarn",
    ),
    "transformers 5 saved it: theta alone": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ("rope_theta", "rope_scaling"),
        {},
        "new_dialect_alone",
        None,
    ),
    "YaRN's own keys: type and finetuned": (
        scaled(type="yarn", factor=4.0, original_max_position_embeddings=64, finetuned=True),
        (),
        {},
        "dead_keys",
        "yarn",
    ),
    "YaRN's remote code of 2023": (
        scaled(**YARN) | {"auto_map": {"AutoModelForCausalLM": "modeling_llama_yarn.LlamaForCausalLM"}},
        (),
        {},
        "old_remote_code",
        "yarn",
    ),
    "type su": (scaled(type="su", attention_factor=1.0, factor=4.0, **LISTS), (), {}, "old_names", "longrope"),
    "type ntk": ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, (), {}, "old_names", "ntk"),
    "yarn without the original length": (
        scaled(rope_type="yarn", factor=4.0),
        (),
        {},
        "factor_missing",
        "yarn",
    ),
    "yarn without the factor": (
        scaled(rope_type="yarn", original_max_position_embeddings=64),
        (),
        {},
        "factor_missing",
        "yarn",
    ),
    "linear without the factor": (
        scaled(rope_type="linear", original_max_position_embeddings=64),
        (),
        {},
        "factor_missing",
        "pi",
    ),
    "yarn, length not raised": (scaled(64, **YARN), (), {}, "length_not_raised", "yarn"),
    "yarn, length raised twice": (scaled(1024, **YARN), (), {}, "length_not_raised", "yarn"),
    "llama3, length not raised": (
        scaled(64, **YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        (),
        {},
        "length_not_raised",
        "llama3",
    ),
    "an integer factor": (scaled(rope_type="linear", factor=4), (), {}, "whole_factor", "pi"),
    "a factor in quotes": (scaled(rope_type="linear", factor="4.0"), (), {}, "numbers_as_text", "pi"),
    "an original length in quotes": (
        scaled(**YARN | {"original_max_position_embeddings": "64"}),
        (),
        {},
        "numbers_as_text",
        "yarn",
    ),
    "a length in quotes": (scaled("256", **YARN), (), {}, "numbers_as_text", "yarn"),
    "a theta in quotes": (scaled(**YARN) | {"rope_theta": "5e5"}, (), {}, "numbers_as_text", "yarn"),
    "attn_factor alone, as DeepSeek writes it": (
        scaled(**YARN, attn_factor=1.2),
        (),
        {},
        "attention_factor",
        None,
    ),
    "attention_factor alone": (scaled(**YARN, attention_factor=1.5), (), {}, "attention_factor", None),
    "a null theta inside": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        ("rope_scaling",),
        {},
        "theta_missing",
        None,
    ),
    "two original lengths": (
        scaled(**YARN | {"original_max_position_embeddings": 128}) | {"original_max_position_embeddings": 64},
        (),
        {},
        "originals_differ",
        "yarn",
    ),
    "two dialects that disagree": (
        scaled(**YARN) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        (),
        {},
        "dialects_differ",
        "yarn",
    ),
    "a null head_dim": (scaled(**YARN) | {"head_dim": None}, (), {}, "head_dim_null", "yarn"),
    "the tokenizer's old length": (
        scaled(**YARN),
        (),
        {"tokenizer_config": {"model_max_length": 64}},
        "tokenizer_length",
        "yarn",
    ),
    "generation ends at the old length": (
        scaled(**YARN),
        (),
        {"generation_config": {"max_length": 64}},
        "generation_length",
        "yarn",
    ),
    "the old length by another name": (
        scaled(**YARN) | {"seq_length": 64, "max_sequence_length": 64},
        (),
        {},
        "lengths_differ",
        "yarn",
    ),
    "Mistral's window kept": (
        scaled(**YARN) | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64},
        (),
        {},
        "window_too_short",
        "yarn",
    ),
    "LongLoRA: scaling never saved": (
        {},
        (),
        {"tokenizer_config": {"model_max_length": 250}},
        "scaling_forgotten",
        "pi",
    ),
}

UNMENDABLE = {
    "dynamic": (scaled(64, rope_type="dynamic", factor=4.0), "depends_on_the_call"),
    "dynamic that never scales": (
        scaled(256, rope_type="dynamic", factor=4.0, original_max_position_embeddings=64),
        "never_sets_in",
    ),
    "switching": (
        scaled(rope_type="longrope", factor=4.0, **LISTS | {"short_factor": [1.0] * 16}),
        "depends_on_the_call",
    ),
    "a list for another model": (
        scaled(rope_type="longrope", factor=4.0, **LISTS | {"long_factor": [2.0] * 8, "short_factor": [2.0] * 8}),
        "lists_of_wrong_length",
    ),
    "a length below a token": ({"max_position_embeddings": -5}, "unusable"),
    "an unknown type": (scaled(rope_type="telepathy", factor=4.0), "old_names"),
    "text for a number": (scaled(rope_type="linear", factor="four"), "numbers_as_text"),
    "llama3 without its bounds": (
        scaled(rope_type="llama3", factor=4.0, original_max_position_embeddings=64),
        "parts_missing",
    ),
    "longrope without its lists": (
        scaled(rope_type="longrope", factor=4.0, original_max_position_embeddings=64),
        "parts_missing",
    ),
    "the same without a theta": (
        scaled(rope_type="longrope", factor=4.0, original_max_position_embeddings=64) | {"rope_theta": None},
        "parts_missing",
    ),
    "a scaling without a type": (scaled(factor=4.0), "type_missing"),
    "a scaling with a null type": (scaled(type=None, factor=4.0), "type_missing"),
    "a type without its object": ({"rope_scaling": "linear"}, "type_missing"),
    "a factor below 1": (scaled(**YARN | {"factor": 0.5}), "factor_below_one"),
    "yarn without anything": (scaled(rope_type="yarn"), "factor_missing"),
    "another kind of rope": ({"model_type": "gpt2"}, "family"),
}


def expected(plain, method, tokens, options):
    model = ctxext.load(plain).eval()
    ctxext.patch(model, method, 4, **options)
    return logits(model, tokens)
