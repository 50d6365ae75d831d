"""Patch a live model in place: apply a schedule, verify that it reached attention, undo it.

Only the instance changes, never a transformers class. The patch is one attribute (the decoder's rotary module),
a few keys of its config and, for what cos and sin can't carry, the forwards of its attention modules, so it
survives save_pretrained, PEFT, device maps, torch.compile and gradient checkpointing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import methods
from ..config.block import digest
from ..config.families import SCALED_LAYERS, unsupported_reason
from ..config.keys import head_dim, sliding_window, window_message
from ..config.read import read_rope
from ..errors import CtxextError, warn
from ..rope import Schedule, unpatched
from ..rope.encodings import sinusoid_frequencies
from . import attention as positioned
from . import biases, learned, qk_norm
from .rotary import build, build_stages, config_edits, is_nested, rebuild, table_of
from .staged_attention import attention_modules, wrap
from .stages import StagedRotary, find_layout


class _MISSING:
    """Stands for an attribute that wasn't there. A class, as copies and pickles of a model keep its identity."""


_STATE = "_ctxext"


@dataclass
class _Patch:
    """What undoing needs: the module and the config values that were there before.

    forwards, views: the forward and the config that single modules had of their own.
    """

    schedule: Schedule
    rotary: nn.Module
    config: dict[str, Any] = field(default_factory=dict)
    windows: list[tuple[nn.Module, Any]] = field(default_factory=list)
    forwards: dict[nn.Module, Any] = field(default_factory=dict)
    views: dict[nn.Module, Any] = field(default_factory=dict)


def patch(
    model: nn.Module,
    method: str,
    factor: float,
    *,
    trained_length: int | None = None,
    existing: str = "refuse",
    **params: Any,
) -> Schedule:
    """Make a live transformers model run `method` at `factor`, in place, and return the schedule.

    model: any decoder of transformers with the standard rotary embedding, wrapped by PEFT or compiled or
        not, on any device. Patching it again replaces the earlier patch; it does not compose with it. A KV cache
        holds what the earlier one computed: start with an empty one (refused otherwise, except between two static
        schedules, whose keys nothing tells apart).
    trained_length: tokens, when config.max_position_embeddings is not what the model was trained with.
    existing: for a checkpoint whose config is already scaled: "refuse", "replace" or "compose".
    params: the method's options (see `ctxext.methods.get(method).options`).

    Raises UsageError for a bad factor or option, CtxextError if the model can't be patched or the patch
    had no effect. The model is unchanged after an error.
    """
    rope = read_rope(original_config(model), trained_length=trained_length, existing=existing)
    schedule = methods.schedule(rope, method, factor, **params)
    apply(model, schedule)
    return schedule


def original_config(model: nn.Module) -> dict[str, Any]:
    """The config of a live model as a dict, with the values that it had before it was patched."""
    owner = find_decoder(model)
    before = getattr(owner, _STATE, None)
    config = owner.rotary_emb.config.to_dict()
    if before:
        config = {**config, **{k: v for k, v in before.config.items() if v is not _MISSING}}
        config = {k: v for k, v in config.items() if before.config.get(k) is not _MISSING}
    return config


def apply(model: nn.Module, schedule: Schedule) -> None:
    """Make a live model run a schedule that was made earlier; see `patch` for the errors."""
    owner = find_decoder(model)
    before = getattr(owner, _STATE, None)
    if before:
        _restore(owner, before)
    try:
        _install(owner, schedule)
    except BaseException:
        if before:
            _install(owner, before.schedule)
        raise


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: the original rotary module and config values come back, so logits are equal to the bit.

    Raises CtxextError if the model isn't patched.
    """
    owner = find_decoder(model)
    state = getattr(owner, _STATE, None)
    if state is None:
        raise CtxextError("this model isn't patched")
    _restore(owner, state)


def schedule_of(model: nn.Module) -> Schedule | None:
    """The schedule that a live model was patched with, or None."""
    state = getattr(find_decoder(model), _STATE, None)
    return state.schedule if state else None


def find_decoder(model: nn.Module) -> nn.Module:
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
    if getattr(owners[0], _STATE, None) is None:
        config = getattr(rotary, "config", None)
        reason = unsupported_reason(config.to_dict()) if config is not None else "its rotary has no config"
        if reason:
            raise CtxextError(f"can't patch this model: {reason}")
        table_of(rotary)
    return owners[0]


def _install(owner: nn.Module, schedule: Schedule) -> None:
    config = owner.rotary_emb.config
    rotary = owner.rotary_emb
    replacement = _build(owner, config, schedule)
    state = _Patch(schedule, rotary)
    for key, value in config_edits(config, schedule).items():
        state.config[key] = getattr(config, key, _MISSING)
        setattr(config, key, value)
    _widen_window(owner, config, schedule, state)
    owner.rotary_emb = replacement
    replacement.config = config
    setattr(owner, _STATE, state)
    try:
        if len(schedule.stages) > 1:
            _stage_attention(owner, replacement, state)
        _beyond_table(owner, rotary, schedule, state)
        verify(owner)
    except BaseException:
        _restore(owner, state)
        raise


def _build(owner: nn.Module, config: Any, schedule: Schedule) -> nn.Module:
    """The rotary module for any schedule."""
    kinds = getattr(config, "layer_types", None) or ()
    if (len(schedule.stages) > 1 or schedule.changes_attention) and set(kinds) - {"full_attention"}:
        raise CtxextError(
            f"{schedule.method} needs full attention in every layer, this model has {sorted(set(kinds))}",
            hint="use a static method, such as yarn",
        )
    if len(schedule.stages) == 1:
        return build(owner.rotary_emb, config, schedule)
    modules = build_stages(owner.rotary_emb, config, schedule)
    layout = find_layout(attention_modules(owner)[0], rebuild(owner.rotary_emb, config, unpatched(schedule.rope)))
    return StagedRotary(modules, [stage.start for stage in schedule.stages], layout, digest(schedule))


def _stage_attention(owner: nn.Module, rotary: StagedRotary, state: _Patch) -> None:
    for module in attention_modules(owner):
        _keep_forward(module, state)
        wrap(module, rotary)


def _beyond_table(owner: nn.Module, original: nn.Module, schedule: Schedule, state: _Patch) -> None:
    """Install what neither frequencies nor stages can express."""
    rotating = attention_modules(owner)
    config = owner.rotary_emb.config
    if schedule.changes_attention:
        layout = None
        if schedule.distances:
            layout = find_layout(rotating[0], rebuild(original, config, unpatched(schedule.rope)))
        if schedule.bias and schedule.bias.kind == "t5":
            table = biases.T5Bias(schedule.bias, config.num_attention_heads)
            learned.add(owner, biases.TABLE, schedule.bias, table)
        if schedule.norms:
            sizes = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
            norms = qk_norm.QKNorm(schedule.norms, *sizes, head_dim(config.to_dict()))
            learned.add(owner, qk_norm.NORMS, schedule.norms, norms)
        for module in rotating if schedule.distances else attention_modules(owner, unrotated=True):
            _keep_forward(module, state)
            state.views[module] = module.config if hasattr(module, "config") else _MISSING
            positioned.wrap(module, schedule, owner, layout)
    if schedule.unrotated:
        chosen = set(schedule.unrotated.of(config.num_hidden_layers))
        for module in rotating:
            if module.layer_idx in chosen:
                _keep_forward(module, state)
                module.forward = functools.partial(positioned.unrotated_forward, module.forward)
    if schedule.table:
        first = _decoder_layers(owner, rotating[0])[0]
        frequencies = tuple(sinusoid_frequencies(config.hidden_size, schedule.table.base))
        _keep_forward(first, state)
        first.forward = functools.partial(positioned.add_table, first.forward, frequencies, schedule.table.scale)


def _decoder_layers(owner: nn.Module, attention: nn.Module) -> nn.ModuleList:
    """The list of layers that one of its attention modules is in."""
    return next(
        m
        for m in owner.modules()
        if isinstance(m, nn.ModuleList) and any(attention is inner for inner in m.modules())
    )


def _keep_forward(module: nn.Module, state: _Patch) -> None:
    state.forwards.setdefault(module, module.__dict__.get("forward", _MISSING))


def _restore(owner: nn.Module, state: _Patch) -> None:
    config = owner.rotary_emb.config
    owner.rotary_emb = state.rotary
    for key, value in state.config.items():
        if value is _MISSING:
            delattr(config, key)
        else:
            setattr(config, key, value)
    for module, window in state.windows:
        module.sliding_window = window
    for module, forward in state.forwards.items():
        if forward is not _MISSING:
            module.forward = forward
        elif "forward" in module.__dict__:
            del module.forward
    for module, view in state.views.items():
        if view is not _MISSING:
            module.config = view
    learned.put_aside(owner)
    delattr(owner, _STATE)


def _widen_window(owner: nn.Module, config: Any, schedule: Schedule, state: _Patch) -> None:
    """Drop a sliding window that every layer has and that is shorter than the target."""
    window = sliding_window(config.to_dict())
    # Stages and changed attention can't use the keys of a sliding cache: they drop even a window that is wide
    # enough.
    table = len(schedule.stages) == 1 and not schedule.changes_attention
    if window is None or (window >= schedule.max_length and table):
        return
    if getattr(config, "layer_types", None):
        raise CtxextError(
            f"every layer has a sliding window of {window} tokens, set per layer",
            hint="load the model with layer_types of full_attention and patch it then",
        )
    warn(window_message(window, schedule.max_length))
    state.config["sliding_window"] = window
    config.sliding_window = None
    for module in owner.modules():
        if getattr(module, "sliding_window", None) == window:
            state.windows.append((module, window))
            module.sliding_window = None


class _Reached(Exception):
    """Ends the probe's forward at the first decoder layer."""


@torch.no_grad()
def verify(owner: nn.Module) -> None:
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

    def stop(module: nn.Module, args: tuple, kwargs: dict) -> None:
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
