"""The recipe of a training from scratch: its sections, and how a YAML file becomes one. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ctxext.training import yaml_recipe
from ctxext.training.yaml_recipe import Section


class ModelSpec(Section):
    """Fields of LlamaConfig, by the same names (the vocabulary size comes from the tokenizer)."""

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    max_position_embeddings: int = Field(gt=0)
    rope_theta: float = Field(gt=0)
    tie_word_embeddings: bool = True
    initializer_range: float = Field(default=0.02, gt=0)


class TokenizerSpec(Section):
    vocab_size: int = Field(ge=257, description="256 bytes, the end-of-text token, and merges")
    template_documents: int = Field(default=0, ge=0, description="copies of the passkey strings it also reads")


class PhaseSpec(Section):
    """A stretch of the curriculum: `steps` batches of rows of `length` tokens."""

    name: str
    length: int = Field(ge=16)
    steps: int = Field(gt=0)
    mix: dict[Literal["text", "repeat", "passkey"], float] = Field(
        min_length=1, description="share of the rows of each kind"
    )
    pool: tuple[int, int] = Field(
        default=(64, 64), description="how many distinct tokens a repeated unit draws from"
    )

    @model_validator(mode="after")
    def check(self) -> PhaseSpec:
        if min(self.mix.values()) < 0 or not math.isclose(sum(self.mix.values()), 1.0, abs_tol=1e-6):
            raise ValueError(f"mix: shares must be positive and sum to 1, not {sum(self.mix.values()):g}")
        if not 1 <= self.pool[0] <= self.pool[1]:
            raise ValueError("pool: must be [smallest, largest], at least 1")
        return self


class DataSpec(Section):
    package: str | None = Field(
        default=None, description="where the text comes from, for the reader of the recipe"
    )
    held_out: list[str] = Field(default_factory=list, description="documents that are never trained on")
    phases: list[PhaseSpec] = Field(min_length=1)


class OptimizationSpec(Section):
    tokens_per_step: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    decay_steps: int = Field(ge=0, description="at the end, from learning_rate to 0; constant before")
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta2: float = Field(default=0.95, gt=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    bf16: bool = False
    trainer: dict[str, Any] = Field(default_factory=dict, description="more TrainingArguments, verbatim")


class OutputSpec(Section):
    save_steps: int = Field(gt=0)
    keep: int = Field(default=2, ge=1, description="checkpoints kept")
    logging_steps: int = Field(default=50, gt=0)


class PretrainRecipe(Section):
    seed: int
    model: ModelSpec
    tokenizer: TokenizerSpec
    data: DataSpec
    optimization: OptimizationSpec
    output: OutputSpec

    @model_validator(mode="after")
    def check(self) -> PretrainRecipe:
        limit, tokens = self.model.max_position_embeddings, self.optimization.tokens_per_step
        for phase in self.data.phases:
            if phase.length > limit:
                raise ValueError(
                    f"phase {phase.name!r}: length {phase.length} exceeds max_position_embeddings {limit}"
                )
            if tokens % phase.length:
                raise ValueError(
                    f"phase {phase.name!r}: tokens_per_step {tokens} is no multiple of {phase.length}"
                )
        if self.steps < self.optimization.warmup_steps + self.optimization.decay_steps:
            raise ValueError(f"warmup_steps + decay_steps exceed the {self.steps} steps of the phases")
        return self

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.data.phases)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> PretrainRecipe:
    """Read and validate a recipe; `overrides` are `section.key=value`, the value being YAML."""
    return yaml_recipe.load(PretrainRecipe, path, overrides)
