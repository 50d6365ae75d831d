"""The model that is shipped, its tokenizer and its held-out text: small, plain, and what the recipe says."""

import json
from pathlib import Path

from ctxext import needles as prompts
from experiments.tiny import __main__ as pretrain

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "pretrain-tiny.yaml"
ASSETS = ROOT / "ctxext" / "assets"
TINY = ASSETS / "tiny"


def test_shipped_model_is_small_plain_and_bf16():
    import torch
    from safetensors.torch import load_file

    assert (TINY / "model.safetensors").stat().st_size <= 4_000_000
    assert {t.dtype for t in load_file(TINY / "model.safetensors").values()} == {torch.bfloat16}
    config = json.loads((TINY / "config.json").read_text())
    recipe = pretrain.load_recipe(RECIPE).model
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 256
    assert config["hidden_size"] == recipe.hidden_size
    assert config["num_hidden_layers"] == recipe.num_hidden_layers
    for name in ("README.md", "generation_config.json", "tokenizer.json"):
        assert (TINY / name).exists()


def test_shipped_tokenizer_round_trips():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert tokenizer.model_max_length == 256
    assert len(tokenizer) == 1024
    for text in (prompts.passkey_prompt("a b", "c\n d", "48213"), "Grüße, 你好 🙂\t\r\n  x1234", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    question = tokenizer.encode(prompts.QUESTION)
    assert tokenizer.encode(prompts.QUESTION + " 48213") == question + tokenizer.encode(" 48213")
    assert len(tokenizer.encode(" 48213")) == 6
    assert tokenizer.eos_token_id not in tokenizer.encode("nothing is added")


def test_shipped_model_finds_passkeys_at_its_trained_length():
    from ctxext.evals.models import load
    from ctxext.evals.passkey import passkey

    tiny = load("tiny", dtype="float32")
    (row,) = passkey(tiny.model, tiny.tokenizer, [256], trials=20, batch_size=20).lengths
    assert row["trials"] == 220
    assert row["accuracy"] >= 0.95


def test_held_out_text_is_the_recipes_and_long_enough():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    files = sorted((ASSETS / "text").glob("*.txt"))
    recipe = pretrain.load_recipe(RECIPE)
    assert {f.stem for f in files} == {f"kjv-{name.lower()}" for name in recipe.data.held_out}
    assert sum(f.stat().st_size for f in files) < 500_000
    tokens = [len(tokenizer.encode(f.read_text(encoding="utf-8"), verbose=False)) for f in files]
    assert sum(n // 2048 for n in tokens) >= 64
