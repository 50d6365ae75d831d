"""Runs of the smoke recipe on the embedded model, small enough for every test to have its own."""

from pathlib import Path

from safetensors.torch import load_file

from ctxext.folders.source import TINY
from ctxext.training.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["model.dtype=float32", "data.length=64", "train.warmup_steps=0", "train.logging_steps=1"]


def write_text(folder):
    """A file of four short documents' worth of the embedded text."""
    path = folder / "ruth.txt"
    path.write_text((TINY.parent / "text" / "kjv-ruth.txt").read_text()[:8000])
    return path


def recipe(out, text, cache, *changes):
    overrides = [f"output={out}", f"data.sources=[{{path: {text}}}]", f"data.cache={cache}", *SMALL, *changes]
    return load_recipe(RECIPES / "smoke-cpu.yaml", overrides)


def weights(out, name="adapter/adapter_model.safetensors"):
    return load_file(out / name)
