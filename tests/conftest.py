"""Pico models made in a temporary folder: small enough to run anywhere, real in every mechanism."""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pico_config(model_type="llama", **changes):
    """Config of a 3-layer model of any standard family: heads of 32, 4 query and 2 key heads, trained on 64."""
    from transformers import CONFIG_MAPPING

    keys = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "head_dim": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.15,
    }
    import inspect

    known = inspect.signature(CONFIG_MAPPING[model_type].__init__).parameters
    return CONFIG_MAPPING[model_type](
        **{k: v for k, v in {**keys, **changes}.items() if k in known or k in changes}
    )


def pico_model(model_type="llama", seed=0, **changes):
    """A pico model with random weights, large enough that positions matter to its logits; eval mode, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(pico_config(model_type, **changes)).eval()


@pytest.fixture(scope="session")
def tokens():
    import torch

    return torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A saved pico Llama with the files that come with a real checkpoint."""
    folder = tmp_path_factory.mktemp("models") / "pico-llama"
    pico_model().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64, "unknown": [1]}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "do_sample": True}))
    (folder / "modeling_custom.py").write_text("# remote code\n")
    (folder / "README.md").write_text("# the base card\n")
    return folder


def logits(model, ids):
    import torch

    with torch.no_grad():
        return model(ids).logits


def run(monkeypatch, capsys, *args):
    """Exit code, stdout and stderr of `ctxext ARGS`, in this process."""
    import sys

    from ctxext.cli.app import main

    monkeypatch.setattr(sys, "argv", ["ctxext", *map(str, args)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


# ---------------------------------------------------------------- tests/training: one text, cache and run for all


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    from smoke import write_text

    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def adapter(text, cache, tmp_path_factory):
    """A run of 8 steps with everything trainable that can be, and what it answered."""
    from smoke import recipe

    from ctxext.training.run import train

    out = tmp_path_factory.mktemp("run") / "out"
    return out, train(recipe(out, text, cache))
