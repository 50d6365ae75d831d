"""The model of a run: loaded, patched, and with what a recipe trains made trainable, safely."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import methods
from ..config.families import require_support
from ..config.read import read_rope
from ..errors import CtxextError, UsageError
from ..files import read_config
from ..folders.heads import require_causal
from ..folders.load import PEFT_NOISE, base_model, stored_schedule
from ..live.t5_bias import T5Table
from ..rope import Schedule
from .recipe import AdapterSpec, Recipe, parallel_sizes


def make_schedule(recipe: Recipe, folder: Path) -> Schedule | None:
    """What the recipe's method makes of this checkpoint; without a method, what its folder says, or None."""
    config = read_config(folder)
    require_causal(config, folder, "training")
    spec, model = recipe.method, recipe.model
    if spec is None:
        return stored_schedule(config)
    try:
        require_support(config, trust_remote_code=model.trust_remote_code)
        rope = read_rope(config, trained_length=model.trained_length, existing=model.existing)
    except CtxextError as error:
        raise CtxextError(error.message, hint=_in_recipe(error.hint)) from error
    return methods.schedule(rope, spec.name, spec.factor, **spec.params)


def _in_recipe(hint: str | None) -> str | None:
    """A hint at options of the command line, as keys of a recipe."""
    if hint is None:
        return None
    valued = re.sub(r"--(existing) (\w+)", r"model.\1=\2", hint)
    found = re.sub(r"--([a-z-]+)", lambda option: "model." + option[1].replace("-", "_"), valued)
    return re.sub(r"\bpass (?=model\.)", "set ", found)


def target_of(recipe: Recipe, schedule: Schedule | None) -> int:
    """Positions of the run's windows lie in [0, this). Raises UsageError if the method doesn't reach so far."""
    spec, length = recipe.positions, recipe.data.length
    reach = schedule.max_length if schedule else length
    wanted = length if spec.kind == "plain" else spec.target or reach
    if recipe.method is not None and schedule is not None and wanted > reach:
        what = "data.length" if spec.kind == "plain" else "positions.target"
        raise UsageError(
            f"{what} {wanted} is beyond the {reach} tokens that {schedule.method} x{schedule.factor:g} reaches",
            hint="raise method.factor",
        )
    if spec.kind != "plain" and wanted <= length:
        raise UsageError(
            f"the method reaches {wanted} tokens and the window holds {length}: there is nothing to skip",
            hint="make data.length shorter, or set positions.kind: plain",
        )
    return wanted


def build(recipe: Recipe, folder: Path, schedule: Schedule | None) -> nn.Module:
    """The patched model in training mode, with its adapter, or all weights, trainable in float32."""
    spec, attention = recipe.adapter, recipe.model.attention
    if attention == "auto" and parallel_sizes()[0] > 1:
        attention = "sdpa"  # context parallel has nothing else
    options: dict[str, Any] = {
        "dtype": "auto" if recipe.model.dtype == "auto" else getattr(torch, recipe.model.dtype),
        "attn_implementation": attention,
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    if spec.quantize:
        options |= _four_bit()
    model = base_model(folder, schedule, **options)
    if spec.quantize:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if spec.kind == "lora":
        model = add_lora(model, spec)
    # An AdamW step of 2e-5 is below the resolution of bf16 for most weights: they would never move.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.train()


def _four_bit() -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise CtxextError("adapter.quantize: 4bit needs a GPU", hint="leave it out to train a plain LoRA")
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        )
    }


def add_lora(model: Any, spec: AdapterSpec) -> nn.Module:
    """`model` with a LoRA adapter. Embedding and norms, if asked for, are trained as whole copies beside it."""
    from peft import LoraConfig, get_peft_model

    whole = []
    if spec.embeddings:
        embedding = model.get_input_embeddings()
        whole.append(next(name for name, m in model.named_modules() if m is embedding))
    if spec.norms:
        # Full names: PEFT matches by suffix, and "norm" alone would also catch whatever ends so.
        whole += [name for name, m in model.named_modules() if type(m).__name__.endswith("Norm")]
    # What a patch adds is small, and of no use untrained.
    whole += [name for name, m in model.named_modules() if isinstance(m, T5Table)]
    targets = spec.targets
    if spec.layers is not None and targets == "all-linear":  # PEFT takes a choice of layers with a list only
        head = model.get_output_embeddings()
        linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
        targets = sorted({name.rpartition(".")[2] for name in linear})
    # Training a copy of a tied embedding unties the head, unless PEFT is told to copy the tie.
    tied = bool(spec.embeddings and model.config.get_text_config().tie_word_embeddings)
    try:
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=spec.r,
            lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=spec.dropout,
            target_modules=targets,
            layers_to_transform=spec.layers,
            use_rslora=spec.rslora,
            use_dora=spec.dora,
            modules_to_save=whole or None,
            ensure_weight_tying=tied,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=PEFT_NOISE, category=FutureWarning)
            return get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(f"adapter: {str(error).splitlines()[0]}") from error


def loraplus_groups(model: nn.Module, learning_rate: float, ratio: float, decay: float) -> list[dict[str, Any]]:
    """Parameter groups of LoRA+ (Hayou et al. 2024, arXiv:2402.12354): matrices B learn `ratio` times as fast.

    PEFT's own helper would speed up trained norms by the same ratio, as it takes every vector for a B.
    """
    fast = [p for n, p in model.named_parameters() if p.requires_grad and "lora_B" in n]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and "lora_B" not in n]
    return [
        {"params": rest, "lr": learning_rate, "weight_decay": decay},
        {"params": fast, "lr": learning_rate * ratio, "weight_decay": decay},
    ]
