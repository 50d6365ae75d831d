"""Load what ctxext wrote, or any other model, with its whole schedule."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.block import read_block
from ..config.smollm3 import is_written
from ..config.write import write_config
from ..errors import CtxextError, UsageError, require
from ..files import check_weights, has_weights, read_config
from ..rope import Schedule, unpatched
from .adapter import check_base, read_adapter
from .source import HUB_OPTIONS, resolve


def stored_schedule(config: Mapping[str, Any]) -> Schedule | None:
    """The schedule that ctxext left in a config.json, or None."""
    return read_block(config["ctxext"]) if config.get("ctxext") else None


def load(path_or_id: str | os.PathLike, **kwargs: Any) -> Any:
    """Load a model that ctxext wrote, or any other, with its whole schedule.

    An adapter of `ctxext train` is loaded on its base, patched as in training (see `load_adapter`).
    kwargs go to AutoModelForCausalLM.from_pretrained; those about a hub id (revision, token, cache_dir,
    local_files_only, force_download) choose what is taken from the hub. What plain transformers can run is loaded
    by plain transformers; for the rest the original rope is loaded and the schedule from the folder's ctxext block
    is applied to the live model. Returns the model. Raises CtxextError if there is none, or no weights, and
    UsageError for an attention that can't be had.
    """
    folder = resolve(path_or_id, **{name: kwargs[name] for name in HUB_OPTIONS if name in kwargs})
    if (folder / "adapter_config.json").is_file():
        kwargs.pop("revision", None)  # the adapter's, not its base's
        return load_adapter(folder, **kwargs)
    if not has_weights(folder):  # as transformers names them; others may be meant, but not none at all
        check_weights(folder)
    config = read_config(folder)
    schedule = stored_schedule(config)
    plain = schedule is None or schedule.is_static or is_written(config, schedule)
    try:
        return base_model(folder, None if plain else schedule, **kwargs)
    except (ValueError, ImportError) as error:
        wanted = kwargs.get("attn_implementation")
        if not isinstance(wanted, str) or wanted not in str(error):
            raise
        raise UsageError(f"attention {wanted!r}: {str(error).splitlines()[0]}") from error


def load_learned(model: Any, folder: Path) -> bool:
    """Give a patched live model what a folder holds of the patch's own weights; False if it holds none.

    That is a learned bias table. The model was made by a class of transformers, which knows no such weights and
    left them unread. Raises CtxextError if the folder has one that the model doesn't, or one of another shape.
    """
    import torch
    from safetensors import safe_open

    from ..live.undo import LEARNED

    def name_of(weight: str) -> str | None:
        return weight[weight.index(LEARNED) :] if f"{LEARNED}." in weight else None

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


PEFT_NOISE = "`is_gradient_checkpointing` is deprecated"
"""Of transformers, about a property that PEFT asks for on every load."""


def load_adapter(folder: str | os.PathLike, *, base: str | os.PathLike | None = None, **kwargs: Any) -> Any:
    """The base with the adapter's rope and the adapter on it, a PeftModel in evaluation mode.

    base: where the base model is, if not where it was in training. kwargs go to from_pretrained of the base, and
    to the hub if it has to come from there.
    Raises CtxextError for a base with other weights, or one that is patched with another schedule.
    """
    folder = Path(folder)
    entry, schedule = read_adapter(folder)
    base_folder = find_base(entry, base, **{name: kwargs[name] for name in HUB_OPTIONS if name in kwargs})
    check_base(folder, entry, schedule, base_folder)
    return attach(base_model(base_folder, schedule, **kwargs), folder)


def find_base(entry: Mapping[str, Any], base: str | os.PathLike | None, **hub: Any) -> Path:
    """The folder of an adapter's base. hub: as in `resolve`."""
    try:
        return resolve(base if base is not None else entry["base"], **hub)
    except CtxextError as error:
        raise CtxextError(
            f"the base model of this adapter isn't at {base or entry['base']}: {error.message}",
            hint="say where it is: ctxext.load(adapter, base=...), ctxext merge --base ...",
        ) from error


def base_model(folder: Path, schedule: Schedule | None, **kwargs: Any) -> Any:
    """A base model from its folder, patched live with `schedule`, whatever its config says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..live.patch import apply

    if schedule is None:
        return AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    if not kwargs.get("trust_remote_code"):
        original = write_config(read_config(folder), unpatched(schedule.rope))
        del original["ctxext"]
        kwargs["config"] = AutoConfig.for_model(**original)
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    apply(model, schedule)
    load_learned(model, folder)
    return model


def attach(model: Any, folder: Path, **kwargs: Any) -> Any:
    """PeftModel.from_pretrained, without the warning about the entry that is meant for others."""
    require("an adapter", "train", "peft")
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Unexpected keyword arguments \['ctxext'\]")
        warnings.filterwarnings("ignore", message=PEFT_NOISE, category=FutureWarning)
        return PeftModel.from_pretrained(model, folder, **kwargs)
