"""Rotary modules for a live model: transformers' own class rebuilt, and what its table can't express."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config.architectures import is_guard
from ..config.families import SCALED_LAYERS
from ..config.write import write_config
from ..errors import CtxextError
from ..rope import Schedule, unpatched
from . import Foreign


def rebuild(rotary: Foreign, config: Any, schedule: Schedule) -> Foreign:
    """A new rotary module of the same class that runs a static `schedule`, on the device of `rotary`.

    Building the stock class from an edited config, instead of editing its buffers, makes the live model
    equal to a reload of the saved one to the last bit.
    """
    config = copy.deepcopy(config)
    for key, value in config_edits(config, schedule).items():
        setattr(config, key, value)
    with torch.device("cpu"):
        built = type(rotary)(config)
    return keep_float32(built.to(table_of(rotary)[0].device))


def table_of(rotary: Foreign) -> tuple[torch.Tensor, float]:
    """Frequencies and attention scale of a stock module; of its full-attention layers if it has several tables.

    Raises CtxextError if it has none that is called as transformers calls them.
    """
    for prefix in ("", f"{SCALED_LAYERS}_"):
        table = getattr(rotary, f"{prefix}inv_freq", None)
        if isinstance(table, torch.Tensor):
            return table, getattr(rotary, f"{prefix}attention_scaling")
    raise CtxextError(f"can't patch this model: {type(rotary).__name__} has no inv_freq table")


def is_nested(rotary: Foreign) -> bool:
    """Whether a stock module keeps one table per type of layer."""
    return hasattr(rotary, f"{SCALED_LAYERS}_inv_freq")


def config_edits(config: Any, schedule: Schedule) -> dict[str, Any]:
    """The attributes of a live transformers config that `schedule` changes, with their new values."""
    edited = write_config(config.to_dict(), schedule, live=True)
    live = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim", "ctxext")
    if is_guard(edited.get("rope_theta")):
        # A saved config must stop those too that look at no rope type.
        live += ("rope_theta",)
    edits = {k: edited[k] for k in live if k in edited and getattr(config, k, None) != edited[k]}
    if edits.get("rope_parameters", {}).get("rope_type") == "longrope" and not schedule.is_static:
        edits["rope_scaling"] = edited["rope_scaling"]
    return edits


def keep_float32(rotary: Foreign) -> Foreign:
    """Make `.to(torch.bfloat16)` and friends move the module's tensors but never cast them.

    A cast costs 0.4 % of every frequency, which is 57 radians at position 131072. The guard is a partial of
    a module-level function on the instance, so that the module still pickles and deep-copies.
    """
    rotary._apply = functools.partial(_apply_without_cast, rotary)
    return rotary


def _apply_without_cast(rotary: Foreign, fn: Any, recurse: bool = True) -> nn.Module:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return type(rotary)._apply(rotary, move, recurse)


class StartTokenRotary(nn.Module):
    """Original angles for the first `start_tokens` positions, scaled ones after (LongRoPE, eq. 3).

    Which angle a position gets depends on that position alone, so a KV cache stays valid. The attention
    scale applies to every position: it belongs to the logits, not to the angles.
    """

    def __init__(self, original: Foreign, scaled: Foreign, start_tokens: int):
        super().__init__()
        self.original = original
        self.scaled = scaled
        self.start_tokens = start_tokens
        self.config = scaled.config

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (1 or batch, tokens, rotary width), in x's dtype."""
        start = (position_ids < self.start_tokens)[..., None]
        scale = self.scaled.attention_scaling / self.original.attention_scaling
        cos0, sin0 = self.original(x, position_ids)
        cos1, sin1 = self.scaled(x, position_ids)
        return torch.where(start, cos0 * scale, cos1), torch.where(start, sin0 * scale, sin1)


def build(rotary: Foreign, config: Any, schedule: Schedule) -> Foreign:
    """The module that runs a one-stage `schedule` in place of `rotary`, whose config is `config`.

    Raises CtxextError if the rebuilt stock module computes other frequencies than the schedule says.
    """
    table = schedule.table_alone()
    scaled = rebuild(rotary, config, table)
    check_table(scaled, table)
    if schedule.is_static:
        return scaled
    if is_nested(rotary):
        what = schedule.method if schedule.encoding else "start tokens"
        raise CtxextError(
            f"{what}: this needs one rotary embedding for all layers, this model keeps one per layer type"
        )
    if schedule.encoding:
        return scaled
    # Rebuilt, not copied: the model may have been cast, and its own table with it.
    original = rebuild(rotary, config, unpatched(schedule.rope))
    return StartTokenRotary(original, scaled, schedule.start_tokens)


def build_stages(rotary: Foreign, config: Any, schedule: Schedule) -> list[Foreign]:
    """One module per stage. A stage that is the checkpoint as it was is its stock module, to the bit."""
    as_it_was = unpatched(schedule.rope)
    modules = []
    for stage in schedule.stages:
        alone = replace(schedule, stages=(replace(stage, start=0),))
        if replace(stage, start=0) == as_it_was.stages[0]:
            alone = as_it_was
        modules.append(build(rotary, config, alone))
    return modules


def check_table(rotary: Foreign, schedule: Schedule) -> None:
    """Compare a stock module's frequencies and scale with a static schedule's.

    The stock classes compute in float32, so they differ from float64 by a few parts in 1e7 of the unscaled
    frequency (blends are sums of a large and a small part).
    """
    stage = schedule.stages[0]
    expected = torch.tensor(stage.inv_freq, dtype=torch.float64)
    allowed = 3e-6 * torch.tensor(schedule.rope.geometric(), dtype=torch.float64)
    table, scale = table_of(rotary)
    got = table.detach().double().cpu()
    if got.shape != expected.shape or not ((got - expected).abs() <= allowed).all():
        raise CtxextError(
            f"patching {type(rotary).__name__} did not give the frequencies of {schedule.method}",
            hint="please report the model's config.json and your transformers version",
        )
    if abs(scale - stage.attention_scale) > 1e-6:
        raise CtxextError(
            f"patching {type(rotary).__name__} gave attention scale {scale}, "
            f"{schedule.method} needs {stage.attention_scale}"
        )
