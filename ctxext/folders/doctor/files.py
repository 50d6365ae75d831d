"""Checks of the folder as a whole: weights, adapters, forgotten scalings, and the files beside the config."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from pathlib import Path

from ... import methods
from ...config.block import read_block
from ...config.families import unsupported_reason
from ...config.keys import rope_parameters, sliding_window
from ...config.read import base_rope, read_rope, read_schedule
from ...config.rope_parameters import Fallback
from ...config.write import write_config
from ...errors import CtxextError
from ...files import read_config
from ...runtimes.facts import readers, targets
from ..adapter import CONFIG, Base, seal
from ..source import resolve
from ..weights import check_weights
from .check import Found, check
from .folder import Folder, drop_key, set_keys


@check("error", "LongLoRA#42, #81, #181; LlamaFactory#4913")
def adapter_without_rope(folder: Folder) -> Found:
    """An adapter that says nothing about the rope it was trained with."""
    adapter = folder.files.get(CONFIG)
    if adapter is None or adapter.get("ctxext") or folder.config.get("rope_scaling"):
        return
    parts = "its embeddings and norms are in trainable_params.bin, which PEFT doesn't load; "
    what = "the adapter doesn't say which rope its base had in training: on the plain base it is wrong"
    what = (parts if folder.has("trainable_params.bin") else "") + what
    context = folder.context
    if context is None and not folder.has("trainable_params.bin"):
        # An ordinary adapter: its base says its rope, as PEFT reads it.
        return
    if context is None:
        say = "say what it was trained to read, --context N: it is then sealed with linear scaling"
        yield CONFIG, what, f"{say}, as LongLoRA trains", None
        return

    name = adapter["base_model_name_or_path"]
    with contextlib.suppress(CtxextError):
        kind = rope_parameters(read_config(resolve(name)))["rope_type"]
        if kind != "default":
            # The adapter was trained on that rope: another scaling on top would be a guess.
            say = "if it was trained with that rope alone, nothing is wrong; else seal it with the rope it had"
            yield CONFIG, f"{what}, and its base {name} is scaled by {kind} itself", say, None
            return

    def mend(folder: Folder) -> None:
        source = resolve(name)
        config = read_config(source)
        rope = read_rope(config)
        schedule = methods.schedule(rope, "pi", context / rope.trained_length)
        with tempfile.TemporaryDirectory() as work:
            shutil.copyfile(folder.path / CONFIG, Path(work) / CONFIG)
            seal(Path(work), Base.of(name, source), config, schedule)
            for file in ("config.json", CONFIG):
                folder.files[file] = json.loads((Path(work) / file).read_text(encoding="utf-8"))

    yield CONFIG, what, f"seal it with linear scaling to {context} tokens", mend


@check("error", "broken downloads")
def weights(folder: Folder) -> Found:
    """Missing shards and files that are cut short."""
    if CONFIG in folder.files or not folder.config:
        return
    try:
        check_weights(folder.path)
    except CtxextError as error:
        yield "weights", error.message, error.hint or "download it again", None


@check("error", "broken downloads, edited configs")
def unusable(folder: Folder) -> Found:
    """A config.json that no command here can read a rope from."""
    config = folder.config
    if "config.json" not in folder.files or CONFIG in folder.files or config.get("auto_map"):
        return
    try:
        if not isinstance(config.get("model_type"), str):
            raise CtxextError("it names no model_type, so nobody knows what model this is")
        if unsupported_reason(config):
            return
        # Falcon's own configs say no length, which only stops commands that ask for it.
        base_rope(config if "max_position_embeddings" in config else {**config, "max_position_embeddings": 2048})
    except CtxextError as error:
        yield "config.json", error.message, error.hint or "take the config from the base model", None


@check("warning", "families whose rotary embedding is of another kind")
def family(folder: Folder) -> Found:
    """Architectures that ctxext doesn't understand."""
    if not folder.config.get("auto_map") and folder.config:
        reason = unsupported_reason(folder.config)
        if reason:
            yield "config.json", f"its rope can't be judged: {reason}", "nothing to mend here", None


@check("error", "LongLoRA#42, #147, #181: the scaling is passed on the command line and never saved")
def scaling_forgotten(folder: Folder) -> Found:
    """A checkpoint that was trained to read more than it says."""
    length = folder.config.get("max_position_embeddings")
    if folder.scaled or folder.ours or not isinstance(length, int) or CONFIG in folder.files:
        return
    longlora = folder.has("trainable_params.bin")
    told = folder.tokenizer.get("model_max_length")
    target = folder.context or (int(told) if longlora and isinstance(told, int | float) and told < 1e9 else None)
    why = "LongLoRA's trainable_params.bin lies beside it" if longlora else f"--context says {folder.context}"
    what = f"no rope_scaling, though it was trained to read more than {length} tokens ({why})"
    if target is None:
        if longlora:
            yield "config.json", what, "say how many, --context N", None
        return
    if target <= length:
        return

    def mend(folder: Folder) -> None:
        rope = read_schedule(folder.config).rope
        # LongLoRA rounds the factor up.
        schedule = methods.schedule(rope, "pi", float(math.ceil(target / rope.trained_length)))
        folder.files["config.json"] = write_config(folder.config, schedule)

    yield "config.json", what, f"write linear scaling to {target} tokens, as LongLoRA does", mend


@check("error", "torchtitan#4783, Soup#793: a config edited by hand, or saved again by another program")
def block_and_keys(folder: Folder) -> Found:
    """A ctxext block that the rope keys no longer agree with."""
    config = folder.config
    if not folder.ours:
        return
    try:
        schedule = read_block(config["ctxext"])
    except CtxextError as error:
        yield "config.json, ctxext", error.message, error.hint or "patch the original checkpoint again", None
        return
    forms = []
    fallback: Fallback
    for fallback in ("refuse", "static"):
        # What no table comes near has no static form.
        with contextlib.suppress(CtxextError):
            forms += [
                write_config(config, schedule, fallback=fallback, target=t)
                for t in dict.fromkeys(targets().values())
            ]
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    if not any(all(form.get(k) == config.get(k) for k in keys) for form in forms):
        differing = sorted(k for k in keys if forms[0].get(k) != config.get(k))
        yield (
            "config.json",
            f"{', '.join(differing)} no longer say what the ctxext block says ({schedule.method} "
            f"x{schedule.factor:g}): edited by hand, or saved again",
            "write them again from the block",
            set_keys("config.json", **forms[0]),
        )


@check("warning", "mistral with YaRN: sliding_window kept")
def window_too_short(folder: Folder) -> Found:
    """A sliding window that hides what the scaling was for."""
    window, length = sliding_window(folder.config), folder.length
    if window and folder.scaled and length and window < length:
        what = f"every layer sees {window} tokens back, of the {length} that the scaling is for"
        yield "config.json", what, "write null", set_keys("config.json", sliding_window=None)


@check("warning", "vLLM caps the length by it; tokenizers warn")
def tokenizer_length(folder: Folder) -> Found:
    """model_max_length below what the model reads."""
    told, length = folder.tokenizer.get("model_max_length"), folder.config.get("max_position_embeddings")
    if folder.scaled and isinstance(told, int | float) and isinstance(length, int) and told < length:
        capped = readers("tokenizer_config.model_max_length")
        what = f"model_max_length is {told}, the model reads {length}: {capped} stops at the smaller"
        yield (
            "tokenizer_config.json",
            what,
            f"write {length}",
            set_keys("tokenizer_config.json", model_max_length=length),
        )


@check("warning", "generation stops at the old length")
def generation_length(folder: Folder) -> Found:
    """generation_config.json with the old max_length."""
    told = folder.files.get("generation_config.json", {}).get("max_length")
    length = folder.config.get("max_position_embeddings")
    if folder.scaled and isinstance(told, int) and isinstance(length, int) and told < length:
        what = f"max_length {told} ends generation before the {length} tokens that the model reads"
        yield "generation_config.json", what, "drop it", drop_key("generation_config.json", "max_length")
