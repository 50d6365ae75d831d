"""Patch a live model in place: apply a schedule, verify that it reached attention, undo it.

Only the instance changes, never a transformers class. The patch is one attribute (the decoder's rotary module),
a few keys of its config and, for what cos and sin can't carry, the forwards of its attention modules, so it
survives save_pretrained, PEFT, device maps, torch.compile and gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import methods
from ..config.block import digest
from ..config.families import SCALED_LAYERS, unsupported_reason
from ..config.keys import sliding_window, window_message
from ..config.read import Existing, check_layers, read_rope
from ..errors import CtxextError, warn
from ..rope import Schedule, unpatched
from . import Foreign, attention, staged_attention
from .cache import guard
from .encoding import live_encoding
from .rotary import build, build_stages, config_edits, is_nested, rebuild, table_of
from .staged_attention import attention_modules
from .stages import StagedRotary, find_layout
from .undo import Patched, own_config


def patch(
    model: Foreign,
    method: str,
    factor: float,
    *,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    method_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Schedule:
    """Make a live transformers model run `method` at `factor`, in place, and return the schedule.

    model: any decoder of transformers with the standard rotary embedding, wrapped by PEFT or compiled or
        not, on any device. Patching it again replaces the earlier patch; it does not compose with it. A KV cache
        holds what the earlier one computed: start with an empty one (refused otherwise, except between two static
        schedules, or one and the unpatched model, which run stock code throughout and leave nothing to tell by).
    trained_length: tokens, when config.max_position_embeddings is not what the model was trained with.
    existing: for a checkpoint whose config is already scaled: "refuse", "replace" or "compose".
    method_options: the method's own options (see `ctxext methods`); they may also be given by name.

    Raises UsageError for a bad factor or option, CtxextError if the model can't be patched or the patch
    had no effect. The model is unchanged after an error.
    """
    rope = read_rope(original_config(model), trained_length=trained_length, existing=existing)
    schedule = methods.schedule(rope, method, factor, **methods.options(method_options, options))
    apply(model, schedule)
    return schedule


def original_config(model: Foreign) -> dict[str, Any]:
    """The config of a live model as a dict, with the values that it had before it was patched."""
    owner = find_decoder(model)
    before = Patched.of(owner)
    return before.config_before() if before else owner.rotary_emb.config.to_dict()


def apply(model: Foreign, schedule: Schedule) -> None:
    """Make a live model run a schedule that was made earlier; see `patch` for the errors."""
    owner = find_decoder(model)
    before = Patched.of(owner)
    if before:
        before.undo(model)
    try:
        _install(model, owner, schedule)
    except BaseException:
        if before:
            _install(model, owner, before.schedule)
        raise


def unpatch(model: Foreign) -> None:
    """Undo `patch`: the original rotary module and config values come back, so logits are equal to the bit.

    Raises CtxextError if the model isn't patched.
    """
    owner = find_decoder(model)
    state = Patched.of(owner)
    if state is None:
        raise CtxextError("this model isn't patched")
    state.undo(model)


def schedule_of(model: Foreign) -> Schedule | None:
    """The schedule that a live model was patched with, or None."""
    state = Patched.of(find_decoder(model))
    return state.schedule if state else None


def find_decoder(model: Foreign) -> Foreign:
    """The module that owns the rotary embedding: `model.model` of a Llama, whatever is wrapped around it.

    Raises CtxextError if there is none, more than one, or one that isn't transformers' standard kind.
    """
    owners = [m for m in model.modules() if isinstance(getattr(m, "rotary_emb", None), nn.Module)]
    if not owners:
        raise CtxextError("can't patch this model: it has no rotary_emb module")
    if len(owners) > 1:
        raise CtxextError(
            f"can't patch this model: it has {len(owners)} rotary modules, not one for all layers",
            hint="transformers 5 keeps one per decoder; older remote code keeps one per layer",
        )
    rotary = owners[0].rotary_emb
    if Patched.of(owners[0]) is None:
        config = getattr(rotary, "config", None)
        reason = unsupported_reason(config.to_dict()) if config is not None else "its rotary has no config"
        if reason:
            raise CtxextError(f"can't patch this model: {reason}")
        table_of(rotary)
    return owners[0]


# Tensors made in inference mode couldn't be trained with after it.
@torch.inference_mode(False)
def _install(model: Foreign, owner: Foreign, schedule: Schedule) -> None:
    if table_of(owner.rotary_emb)[0].is_meta:
        raise CtxextError(
            "can't patch this model: it is on the meta device, its rotary module holds no frequencies",
            hint="load the weights first (from_pretrained, or to_empty and load_state_dict), and patch it then",
        )
    own_config(owner, model)
    rotary = owner.rotary_emb
    config = rotary.config
    replacement = _rotary_for(owner, schedule)
    patched = Patched(owner, schedule, rotary)
    patched.begin(replacement)
    try:
        for key, value in config_edits(config, schedule).items():
            patched.set_config(key, value)
        _widen_window(patched)
        if schedule.encoding is None:
            # Beside an encoding the config says that plain transformers must not load the model, and some stock
            # modules read theirs in every call: there it keeps the one that it was built from.
            replacement.config = config
        if isinstance(replacement, StagedRotary):
            for number, module in enumerate(attention_modules(owner)):
                staged_attention.wrap(module, replacement, patched, first=number == 0)
        if schedule.encoding is not None:
            encoding = live_encoding(schedule, owner)
            encoding.install(patched)
            if schedule.in_attention:
                modules = attention_modules(owner, unrotated=not encoding.own_rotation)
                for number, module in enumerate(modules):
                    attention.wrap(module, encoding, patched, first=number == 0)
        if (
            len(schedule.stages) == 1
            and not schedule.in_attention
            and (not schedule.is_static or "sliding_window" in patched.config)
        ):
            for module in attention_modules(owner, unrotated=True):
                guard(module, patched)
        verify(owner)
    except BaseException:
        patched.undo(model)
        raise


def _rotary_for(owner: Foreign, schedule: Schedule) -> Foreign:
    """The rotary module for any schedule."""
    config = owner.rotary_emb.config
    check_layers(schedule, lambda: getattr(config, "layer_types", None) or ())
    if len(schedule.stages) == 1:
        return build(owner.rotary_emb, config, schedule)
    modules = build_stages(owner.rotary_emb, config, schedule)
    layout = find_layout(attention_modules(owner)[0], rebuild(owner.rotary_emb, config, unpatched(schedule.rope)))
    return StagedRotary(modules, [stage.start for stage in schedule.stages], layout, digest(schedule))


def _widen_window(patched: Patched) -> None:
    """Drop a sliding window that every layer has and that is shorter than the target."""
    config, schedule = patched.rotary.config, patched.schedule
    window = sliding_window(config.to_dict())
    # Stages and changed attention can't use the keys of a sliding cache: they drop even a window that is wide
    # enough.
    table = len(schedule.stages) == 1 and not schedule.in_attention
    if window is None or (window >= schedule.max_length and table):
        return
    if getattr(config, "layer_types", None):
        raise CtxextError(
            f"every layer has a sliding window of {window} tokens, set per layer",
            hint="load the model with layer_types of full_attention and patch it then",
        )
    warn(window_message(window, schedule.max_length))
    patched.set_config("sliding_window", None)
    for module in patched.owner.modules():
        if getattr(module, "sliding_window", None) == window:
            patched.drop_window(module)


class _Reached(Exception):
    """Ends the probe's forward at the first decoder layer."""


@torch.no_grad()
def verify(owner: Foreign) -> None:
    """Run two tokens up to the first layer and compare what attention is given with the patched table.

    Assigning a module is no proof: transformers has moved the rotary before, and patches that set the
    old place went on without effect. The forward is cut at the first layer, so a large or offloaded model
    costs no more than a small one.
    """
    embedding = owner.get_input_embeddings().weight
    if embedding.is_meta:
        return
    rotary = owner.rotary_emb
    positions = torch.tensor([[0, min(getattr(rotary.config, "max_position_embeddings", 2), 4096) - 1]])
    positions = positions.to(embedding.device)
    kind = (SCALED_LAYERS,) if is_nested(rotary) else ()
    seen = []

    def reaches(cos: torch.Tensor, sin: torch.Tensor) -> bool:
        want_cos, want_sin = rotary(cos[:1], positions, *kind)
        return torch.equal(cos, want_cos.to(cos)) and torch.equal(sin, want_sin.to(sin))

    def stop(module: Foreign, args: tuple, kwargs: dict) -> None:
        given = kwargs.get("position_embeddings")
        if given is None:
            return
        seen.append(isinstance(given, tuple) and reaches(*given))
        # With a rope per layer type the first layer may be one whose rope stays.
        if seen[-1] or not kind:
            raise _Reached

    inner = [m for m in owner.modules() if m is not owner]
    hooks = [m.register_forward_pre_hook(stop, with_kwargs=True) for m in inner]
    try:
        owner(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise CtxextError(
            "the patch has no effect: no layer of this model is given position_embeddings",
            hint="please report the model type and your transformers version",
        )
    if not any(seen):
        raise CtxextError("the patch has no effect: attention is given other angles than the patched module's")
