"""Model folders: patch one without loading its weights, and load what ctxext wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import methods
from ..config.families import require_support
from ..config.messages import window_message
from ..config.read import read_block, read_rope, sliding_window
from ..config.smollm3 import is_written
from ..config.write import write_config
from ..errors import CtxextError, UsageError, warn
from ..files import WEIGHTS, check_overwrite, check_weights, has_weights, link_or_copy, model_files, replacing
from ..rope import Schedule, unpatched
from .card import model_card
from .source import DTYPES, HUB_OPTIONS, display_name, resolve


@dataclass(frozen=True)
class Patched:
    """What `patch_checkpoint` did: where, with which schedule, and how the weights came along."""

    out: Path
    schedule: Schedule
    config: dict[str, Any]
    linked_bytes: int
    copied_bytes: int


def default_out(model: str | os.PathLike, method: str, factor: float) -> Path:
    """./<model name>-<method>-<factor>x"""
    return Path(f"{display_name(model)}-{method}-{factor:g}x")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; CtxextError if it is damaged."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, OSError) as error:
        raise CtxextError(f"{folder / 'config.json'} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise CtxextError(f"{folder / 'config.json'} holds no object")
    return config


def plan(
    src: str | os.PathLike,
    method: str,
    factor: float,
    *,
    trained_length: int | None = None,
    existing: str = "refuse",
    trust_remote_code: bool = False,
    dtype: str = "bfloat16",
    fallback: str = "refuse",
    target: str = "all",
    **params: Any,
) -> tuple[Path, Schedule, dict[str, Any]]:
    """What patching would do: the source folder, the schedule and the new config.json, nothing written.

    trained_length, existing: as in `ctxext.patch`. dtype: of a .gguf's weights. fallback: what plain
    transformers shall do with a schedule that it can't run (several stages, start tokens): "refuse" to load,
    or run its "static" approximation. target: the runtime that comes first, see `config_writing.write_config`.
    params: the method's options.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    methods.get(method).check(params)
    methods.check_factor(factor)
    folder = resolve(src, dtype=dtype)
    if (folder / "adapter_config.json").is_file():
        raise CtxextError(
            f"{folder} is an adapter, not a whole model", hint="patch its base model, or merge the adapter first"
        )
    options = {"trained_length": trained_length, "existing": existing, "trust_remote_code": trust_remote_code}
    options |= {"fallback": fallback, "target": target}
    return folder, *plan_config(read_config(folder), method, factor, **options, **params)


def plan_config(
    config: Mapping[str, Any],
    method: str,
    factor: float,
    *,
    trained_length: int | None = None,
    existing: str = "refuse",
    trust_remote_code: bool = False,
    fallback: str = "refuse",
    target: str = "all",
    **params: Any,
) -> tuple[Schedule, dict[str, Any]]:
    """`plan` for a config.json that was read already: the schedule and the new config.json."""
    require_support(config, trust_remote_code=trust_remote_code)
    rope = read_rope(config, trained_length=trained_length, existing=existing)
    schedule = methods.schedule(rope, method, factor, **params)
    return schedule, patched_config(config, schedule, fallback=fallback, target=target)


def patched_config(config: Mapping[str, Any], schedule: Schedule, **options: Any) -> dict[str, Any]:
    """config.json for `schedule`, without a window that would hide what it reaches. options: of `write_config`."""
    new = write_config(config, schedule, **options)
    window = sliding_window(config)
    if window is not None and window < schedule.max_length:
        warn(window_message(window, schedule.max_length))
        new["sliding_window"] = None
    return new


def patch_checkpoint(
    src: str | os.PathLike,
    out: str | os.PathLike | None = None,
    *,
    method: str,
    factor: float,
    force: bool = False,
    link: bool = True,
    **options: Any,
) -> Patched:
    """Write a patched copy of a checkpoint without reading its weights.

    src: a folder, `tiny`, a .gguf file (dequantised first) or a hub id. out: the new folder, by default
    ./<model>-<method>-<factor>x. Weights are hard-linked where the file system allows it (a link shares
    its bytes with the source: change one and both change), or copied with link=False. Tokenizer,
    generation config, remote code and all other files come along; the length in tokenizer_config.json
    is raised with the config's. options: those of `plan`.

    Written to a temporary sibling and renamed, so a kill leaves either nothing or all of it.
    Raises CtxextError for a model that can't be patched, damaged weights, an existing target without
    `force`, a full disk or a target that can't be written.
    """
    folder, schedule, config = plan(src, method, factor, **options)
    target = Path(out) if out is not None else default_out(src, method, factor)
    return write_patched(folder, target, schedule, config, name=display_name(src), force=force, link=link)


def check_target(folder: Path, target: Path, force: bool) -> None:
    """Raise CtxextError if a patched copy of `folder` can't become `target`, before any work is done for it."""
    target = Path(os.path.abspath(target.expanduser()))
    if target.exists() and folder.resolve().is_relative_to(target.resolve()):
        raise CtxextError(f"{target} is, or holds, the model to patch", hint="write to another folder with -o")
    check_overwrite(target, force)


def write_patched(
    folder: Path,
    target: Path,
    schedule: Schedule,
    config: Mapping[str, Any],
    *,
    name: str,
    force: bool = False,
    link: bool = True,
) -> Patched:
    """The writing part of `patch_checkpoint`: `folder` with a schedule and its config.json. name: for the card."""
    check_target(folder, target, force)
    check_weights(folder)
    written = {
        "config.json": config,
        "tokenizer_config.json": longer_tokenizer(folder, schedule.max_length),
    }
    linked = copied = 0
    with replacing(target, force=force) as temporary:
        for relative in model_files(folder):
            # The source's own card describes the source; it stays readable under another name.
            renamed = Path("README.base.md") if str(relative) == "README.md" else relative
            if str(relative) in written:
                continue
            size = (folder / relative).stat().st_size
            if link_or_copy(folder / relative, temporary / renamed, link=link and relative.suffix in WEIGHTS):
                linked += size
            else:
                copied += size
        for file, data in written.items():
            if data is not None:
                (temporary / file).write_text(json.dumps(data, indent=2) + "\n")
        (temporary / "README.md").write_text(model_card(name, schedule, config))
    return Patched(target, schedule, dict(config), linked, copied)


def longer_tokenizer(folder: Path, length: int) -> dict[str, Any] | None:
    """tokenizer_config.json with model_max_length raised: tokenizers warn, and vLLM stops, at the old one."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        return {**json.loads(path.read_text()), "model_max_length": length}
    except ValueError as error:
        raise CtxextError(f"{path} is damaged: {error}") from error


def stored_schedule(config: Mapping[str, Any]) -> Schedule | None:
    """The schedule that ctxext left in a config.json, or None."""
    return read_block(config["ctxext"]) if config.get("ctxext") else None


def load(path_or_id: str | os.PathLike, **kwargs: Any) -> Any:
    """Load a model that ctxext wrote, or any other, with its whole schedule.

    An adapter of `ctxext train` is loaded on its base, patched as in training (see `adapters.load_adapter`).
    kwargs go to AutoModelForCausalLM.from_pretrained; those about a hub id (revision, token, cache_dir,
    local_files_only, force_download) choose what is taken from the hub. What plain transformers can run is loaded
    by plain transformers; for the rest the original rope is loaded and the schedule from the folder's ctxext block
    is applied to the live model. Returns the model. Raises CtxextError if there is none, or no weights, and
    UsageError for an attention that can't be had.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..live.patch import apply

    folder = resolve(path_or_id, **{name: kwargs[name] for name in HUB_OPTIONS if name in kwargs})
    if (folder / "adapter_config.json").is_file():
        from .adapter import load_adapter

        kwargs.pop("revision", None)  # the adapter's, not its base's
        return load_adapter(folder, **kwargs)
    if not has_weights(folder):  # as transformers names them; others may be meant, but not none at all
        check_weights(folder)
    config = read_config(folder)
    schedule = stored_schedule(config)
    plain = schedule is None or schedule.is_static or is_written(config, schedule)
    if not plain:
        original = write_config(config, unpatched(schedule.rope))
        del original["ctxext"]
        kwargs["config"] = AutoConfig.for_model(**original)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    except (ValueError, ImportError) as error:
        wanted = kwargs.get("attn_implementation")
        if not isinstance(wanted, str) or wanted not in str(error):
            raise
        raise UsageError(f"attention {wanted!r}: {str(error).splitlines()[0]}") from error
    if plain:
        return model
    apply(model, schedule)
    load_learned(model, folder)
    return model


def load_learned(model: Any, folder: Path) -> bool:
    """Give a patched live model what a folder holds of the patch's own weights; False if it holds none.

    That is a bias table or norms of queries and keys. The model was made by a class of transformers, which knows
    no such weights and left them unread. Raises CtxextError if the folder has one that the model doesn't, or one
    of another shape.
    """
    import torch
    from safetensors import safe_open

    from ..live.biases import TABLE
    from ..live.qk_norm import NORMS

    def name_of(weight: str) -> str | None:
        return next((weight[weight.index(name) :] for name in (TABLE, NORMS) if f"{name}." in weight), None)

    own = {name_of(name): parameter for name, parameter in model.named_parameters() if name_of(name)}
    found = False
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for weight in (w for w in file.keys() if name_of(w)):  # noqa: SIM118
                name, values = name_of(weight), file.get_tensor(weight)
                if name not in own or own[name].shape != values.shape:
                    shape = tuple(own[name].shape) if name in own else None
                    raise CtxextError(
                        f"{path} holds {name} of {tuple(values.shape)}, the model has {shape}",
                        hint="patch it with the method and options that it was trained with",
                    )
                with torch.no_grad():
                    own[name].copy_(values)
                found = True
    return found
