"""The shipped recipe for training from scratch, shrunk to seconds, and a text to train on."""

from __future__ import annotations

import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "pretrain-tiny.yaml"

# The shipped recipe, shrunk to seconds: same sections, same kinds of rows.
SMALL = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "model.head_dim=8",
    "tokenizer.vocab_size=400",
    "tokenizer.template_documents=20",
    "data.held_out=[b]",
    "data.phases=[{name: one, length: 64, steps: 30, mix: {repeat: 1.0}, pool: [8, 16]},"
    " {name: two, length: 256, steps: 30, mix: {text: 0.4, passkey: 0.4, repeat: 0.2}, pool: [8, 16]}]",
    "optimization.tokens_per_step=512",
    "optimization.warmup_steps=2",
    "optimization.decay_steps=4",
    "optimization.bf16=false",
    "output.save_steps=5",
    "output.logging_steps=1",
]


def write_corpus(folder: Path) -> Path:
    """Two documents of a few thousand words of text that has no digits."""
    rng = random.Random(0)
    words = ["the", "and", "of", "lord", "king", "house", "water", "day", "said", "unto", "hand", "son"]
    for name, size in (("a", 4000), ("b", 1000)):
        lines = [" ".join(rng.choices(words, k=10)).capitalize() + "." for _ in range(size // 10)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder
