"""Load what ctxext wrote, or any other model, with its whole schedule."""

from __future__ import annotations

import copy
import os
import traceback
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.architectures import architectures
from ..config.block import read_block
from ..config.smollm3 import is_written
from ..config.write import write_config
from ..errors import CtxextError, UsageError, require, warn
from ..files import is_marked, read_config
from ..rope import Schedule, unpatched
from .adapter import check_base, read_adapter
from .heads import auto_class
from .source import HUB_OPTIONS, PLACE_OPTIONS, SourceDtype, resolve
from .weights import check_weights, has_weights, tensor_files


def stored_schedule(config: Mapping[str, Any]) -> Schedule | None:
    """The schedule that ctxext left in a config.json, or None."""
    return read_block(config["ctxext"]) if config.get("ctxext") else None


def load(path_or_id: str | os.PathLike, **kwargs: Any) -> Any:
    """Load a model that ctxext wrote, or any other, with its whole schedule, and its own head.

    An adapter of `ctxext train` is loaded on its base, patched as in training (see `load_adapter`).
    kwargs go to from_pretrained of the auto class that `architectures` in config.json asks for:
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModel ... (see `heads.auto_class`). Those about a
    hub id (revision, token, cache_dir, local_files_only, force_download), subfolder and gguf_file choose what is
    loaded. attn_implementation may also be "auto": sdpa, or eager for a family without sdpa in transformers. What
    plain transformers can run is loaded by plain transformers; for the rest the original rope is loaded and the
    schedule from the folder's ctxext block is applied to the live model. Returns the model, or the pair that
    from_pretrained returns with output_loading_info. Raises CtxextError if there is none, or no weights, and
    UsageError for an attention that can't be had, or another rope for a folder whose schedule is applied here.
    """
    names = (*HUB_OPTIONS, *PLACE_OPTIONS)
    place = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    dtype = str(kwargs.get("dtype") or kwargs.get("torch_dtype")).removeprefix("torch.")
    if dtype in typing.get_args(SourceDtype):
        place["dtype"] = dtype
    folder = resolve(path_or_id, **place)
    for name in PLACE_OPTIONS:
        kwargs.pop(name, None)
    if (folder / "adapter_config.json").is_file():
        kwargs.pop("revision", None)  # the adapter's, not its base's
        return load_adapter(folder, **kwargs)
    if not has_weights(folder) and not kwargs.get("variant"):
        check_weights(folder)
    config = read_config(folder)
    schedule = stored_schedule(config)
    plain = schedule is None or schedule.is_static or is_written(config, schedule)
    return base_model(folder, None if plain else schedule, **kwargs)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; CtxextError if transformers can't make one of what is there."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError, ImportError, KeyError, TypeError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CtxextError(
            f"transformers finds no tokenizer in {folder}: {why[:160]}",
            hint="put the model's tokenizer files (tokenizer.json, tokenizer_config.json) there",
        ) from error


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
    for path in tensor_files(folder):
        if path.suffix != ".safetensors":
            continue
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
    loaded = base_model(base_folder, schedule, **kwargs)
    if isinstance(loaded, tuple):
        return attach(loaded[0], folder), *loaded[1:]
    return attach(loaded, folder)


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
    """A base model from its folder, patched live with `schedule`, whatever its config says.

    kwargs: of from_pretrained, as `load` takes them. Raises UsageError as it does.
    """
    import transformers

    from ..live.patch import apply

    config = read_config(folder)
    for name in ("config.json", "generation_config.json"):
        if is_marked(folder / name):
            raise CtxextError(
                f"{folder / name} begins with a byte order mark, at which transformers' reader stops",
                hint="save it as UTF-8 without one; ctxext patch writes it so",
            )
    if isinstance(kwargs.get("config"), (str, os.PathLike)):
        kwargs["config"] = transformers.AutoConfig.from_pretrained(kwargs["config"])
    name = auto_class(config)
    loader = getattr(transformers, name, transformers.AutoModelForCausalLM)
    model_class = _model_class(loader, config)
    _check_head(config, name, loader, model_class)
    kwargs = _with_attention(model_class, kwargs)
    wanted = kwargs.get("attn_implementation")
    if schedule is not None:
        kwargs = _with_original_rope(folder, config, schedule, kwargs)
    try:
        loaded = loader.from_pretrained(folder, **kwargs)
    except (ValueError, ImportError) as error:
        if not (wanted and _about_attention(error)):
            raise
        raise _no_attention(wanted, str(error)) from error
    if schedule is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        apply(model, schedule)
        load_learned(model, folder)
    return loaded


_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")


def _with_original_rope(folder: Path, config: dict[str, Any], schedule: Schedule, given: dict) -> dict[str, Any]:
    """The arguments of from_pretrained with a config whose rope is the one that `schedule` starts from."""
    for key in _ROPE_KEYS:
        if key in given:
            raise UsageError(
                f"{key}: the schedule of this folder, {schedule.method} x{schedule.factor:g}, takes its place",
                hint="load the folder that it was made from, and patch that",
            )
    said = given.get("config")
    if said is not None:
        from ..live.rotary import config_edits

        said = copy.deepcopy(said)
        for key, value in config_edits(said, unpatched(schedule.rope)).items():
            setattr(said, key, value)
        del said.ctxext
        return {**given, "config": said}
    original = write_config(config, unpatched(schedule.rope))
    del original["ctxext"]
    return _with_config(folder, original, given)


_NOT_OF_CONFIG = ("dtype", "torch_dtype", "quantization_config")
"""Arguments of from_pretrained that an auto class keeps from the config, though it has such keys."""


def _with_config(folder: Path, config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of from_pretrained with this config.json in place of the folder's.

    As AutoConfig would make it: arguments that are keys of the config change it, the others are left.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kept = {name: given[name] for name in _NOT_OF_CONFIG if name in given}
    rest = {name: value for name, value in given.items() if name not in (*kept, "config")}
    if config.get("model_type") in CONFIG_MAPPING:
        made = CONFIG_MAPPING[config["model_type"]]
    else:
        remote = {name: given[name] for name in ("trust_remote_code", "code_revision") if name in given}
        made = type(AutoConfig.from_pretrained(folder, **remote))
    # With return_unused_kwargs it returns a pair, which its type doesn't say.
    answer: Any = made.from_dict(dict(config), return_unused_kwargs=True, **rest)
    return {**answer[1], **kept, "config": answer[0]}


def _model_class(loader: Any, config: Mapping[str, Any]) -> Any:
    """transformers' class that an auto class makes of a config.json; None if a checkpoint brings its own code."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type", "")
    found = loader._model_mapping.get(CONFIG_MAPPING[model_type], None) if model_type in CONFIG_MAPPING else None
    return found[0] if isinstance(found, tuple) else found


def _check_head(config: Mapping[str, Any], name: str, loader: Any, model_class: Any) -> None:
    """Raise CtxextError for a head that transformers doesn't know: another would be random weights."""
    if loader.__name__ == name or model_class is None:
        return
    architecture = architectures(config)[0]
    if not architecture.endswith(model_class.__name__):
        raise CtxextError(
            f"{architecture} is no class of transformers, and {model_class.__name__} hasn't its head",
            hint="load it with the code that it came with, and patch it live: ctxext.patch(model, ...)",
        )


def _with_attention(model_class: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of from_pretrained with "auto" attention settled; UsageError for sdpa where there is none."""
    wanted = given.get("attn_implementation")
    if wanted not in ("auto", "sdpa"):
        return given
    if model_class is None:
        return {k: v for k, v in given.items() if k != "attn_implementation" or wanted != "auto"}
    if model_class._supports_sdpa:
        return {**given, "attn_implementation": "sdpa"}
    if wanted == "sdpa":
        raise _no_attention("sdpa", f"transformers has none for {model_class.__name__}")
    warn(
        f"transformers has no sdpa for {model_class.__name__}: eager attention runs, whose memory grows with the "
        "square of the length"
    )
    return {**given, "attn_implementation": "eager"}


def _no_attention(wanted: Any, why: str) -> UsageError:
    return UsageError(
        f"attention {wanted!r} can't be had: {why.splitlines()[0].partition(' Please')[0]}",
        hint="eager always works; leave it out to take the best that there is",
    )


def _about_attention(error: BaseException) -> bool:
    """Whether transformers raised this where it chooses the attention."""
    return any("attn" in frame.name for frame in traceback.extract_tb(error.__traceback__))


def attach(model: Any, folder: Path, **kwargs: Any) -> Any:
    """PeftModel.from_pretrained, without the warning about the entry that is meant for others."""
    require("an adapter", "train", "peft")
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Unexpected keyword arguments \['ctxext'\]")
        warnings.filterwarnings("ignore", message=PEFT_NOISE, category=FutureWarning)
        return PeftModel.from_pretrained(model, folder, **kwargs)
