"""Write a patched copy of a model folder, without loading its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import methods
from ..config.families import layer_types, require_support
from ..config.keys import sliding_window, window_message
from ..config.read import Existing, check_layers, read_rope
from ..config.rope_parameters import Fallback
from ..config.write import write_config
from ..errors import CtxextError, check_choice, warn
from ..files import WEIGHTS, check_overwrite, check_weights, link_or_copy, model_files, read_config, replacing
from ..rope import Schedule
from ..runtimes.facts import target as runtime_target
from ..runtimes.portability import portability
from .card import model_card
from .source import SourceDtype, display_name, is_gguf, peek, resolve


@dataclass(frozen=True)
class Request:
    """What to make of a checkpoint.

    method, factor, method_options: which schedule. trained_length, existing: as in `ctxext.patch`. fallback: what
    plain transformers shall do with a schedule that it can't run (several stages, start tokens): "refuse" to load,
    or run its "static" approximation. target: the runtime that comes first, see `runtimes.facts.target`.
    trust_remote_code: patch a model that brings its own code.
    """

    method: str
    factor: float
    method_options: Mapping[str, Any] = field(default_factory=dict)
    trained_length: int | None = None
    existing: Existing = "refuse"
    fallback: Fallback = "refuse"
    target: str = "all"
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raise UsageError for what is wrong whatever the checkpoint."""
        methods.get(self.method).check(self.method_options)
        methods.check_factor(self.factor)
        runtime_target(self.target)

    def for_config(self, config: Mapping[str, Any]) -> tuple[Schedule, dict[str, Any]]:
        """The schedule and the new config.json for one that was read already."""
        require_support(config, trust_remote_code=self.trust_remote_code)
        rope = read_rope(config, trained_length=self.trained_length, existing=self.existing)
        schedule = methods.schedule(rope, self.method, self.factor, **self.method_options)
        check_layers(schedule, lambda: layer_types(config))
        return schedule, patched_config(config, schedule, fallback=self.fallback, target=self.target)


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


def plan(
    src: str | os.PathLike, request: Request, *, dtype: SourceDtype = "bfloat16"
) -> tuple[Path, Schedule, dict[str, Any]]:
    """What patching would do: the source folder, the schedule and the new config.json, nothing written.

    dtype: of a .gguf's weights.
    """
    request.check()
    folder = resolve(src, dtype=dtype)
    if (folder / "adapter_config.json").is_file():
        raise CtxextError(
            f"{folder} is an adapter, not a whole model", hint="patch its base model, or merge the adapter first"
        )
    return folder, *request.for_config(read_config(folder))


def patched_config(
    config: Mapping[str, Any], schedule: Schedule, *, fallback: Fallback = "refuse", target: str = "all"
) -> dict[str, Any]:
    """config.json for `schedule`, without a window that would hide what it reaches. Options: see `Request`."""
    new = write_config(config, schedule, fallback=fallback, target=runtime_target(target))
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
    method_options: Mapping[str, Any] | None = None,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    dtype: SourceDtype = "bfloat16",
    fallback: Fallback = "refuse",
    target: str = "all",
    trust_remote_code: bool = False,
    force: bool = False,
    link: bool = True,
    **options: Any,
) -> Patched:
    """Write a patched copy of a checkpoint without reading its weights.

    src: a folder, `tiny`, a .gguf file (dequantised to `dtype` first) or a hub id. out: the new folder, by default
    ./<model>-<method>-<factor>x. Weights are hard-linked where the file system allows it (a link shares
    its bytes with the source: change one and both change), or copied with link=False. Tokenizer,
    generation config, remote code and all other files come along; the length in tokenizer_config.json
    is raised with the config's. The other arguments are described in `Request`; the method's options may be given
    as `method_options` or by name.

    Written to a temporary sibling and renamed, so a kill leaves either nothing or all of it.
    Raises CtxextError for a model that can't be patched, damaged weights, an existing target without
    `force`, a full disk or a target that can't be written.
    """
    asked = Request(
        method=method,
        factor=factor,
        method_options=methods.options(method_options, options),
        trained_length=trained_length,
        existing=existing,
        fallback=fallback,
        target=target,
        trust_remote_code=trust_remote_code,
    )
    goal = Path(out) if out is not None else default_out(src, method, factor)
    return write(src, goal, asked, dtype=dtype, force=force, link=link)


def write(
    src: str | os.PathLike,
    out: Path,
    request: Request,
    *,
    dtype: SourceDtype = "bfloat16",
    force: bool = False,
    link: bool = True,
) -> Patched:
    """`patch_checkpoint` for a request."""
    folder, schedule, config = plan(src, request, dtype=dtype)
    return write_patched(folder, out, schedule, config, name=display_name(src), force=force, link=link)


def check_target(folder: Path, target: Path, force: bool) -> None:
    """Raise CtxextError if a patched copy of `folder` can't become `target`, before any work is done for it."""
    target = Path(os.path.abspath(target.expanduser()))
    source, goal = folder.resolve(), target.resolve()
    if target.exists() and source.is_relative_to(goal):
        raise CtxextError(f"{target} is, or holds, the model to patch", hint="write to another folder with -o")
    if goal.is_relative_to(source):
        raise CtxextError(
            f"{target} lies inside the model to patch, whose files it would hold next time",
            hint="write to another folder with -o",
        )
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
        "generation_config.json": longer_generation(folder, schedule.max_length),
    }
    linked = copied = 0
    with replacing(target, force=force) as temporary:
        for relative in model_files(folder):
            # The source's own card describes the source; it stays readable under another name.
            renamed = Path("README.base.md") if str(relative) == "README.md" else relative
            if written.get(str(relative)) is not None:
                continue
            size = (folder / relative).stat().st_size
            if link_or_copy(folder / relative, temporary / renamed, link=link and relative.suffix in WEIGHTS):
                linked += size
            else:
                copied += size
        for file, data in written.items():
            if data is not None:
                (temporary / file).write_text(json.dumps(data, indent=2) + "\n")
        verdicts = portability(config, folder="this-folder")
        (temporary / "README.md").write_text(model_card(name, schedule, config, verdicts=verdicts))
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


def preview(
    model: str | os.PathLike, request: Request, *, dtype: SourceDtype = "bfloat16"
) -> tuple[Schedule, dict[str, Any]]:
    """The schedule and config.json that `patch_checkpoint` would write; a .gguf is looked at by its header."""
    if not is_gguf(model):
        return plan(model, request, dtype=dtype)[1:]
    check_choice("dtype", dtype, SourceDtype)
    request.check()
    return request.for_config(peek(model))


def check_out(model: str | os.PathLike, out: Path, force: bool) -> None:
    """Raise CtxextError if a patched copy of MODEL can't be written to `out`."""
    if is_gguf(model):
        check_overwrite(Path(os.path.abspath(out.expanduser())), force)
    else:
        check_target(resolve(model), out, force)


def longer_generation(folder: Path, length: int) -> dict[str, Any] | None:
    """generation_config.json without a max_length that would end the default generate() early; None: as it is."""
    path = folder / "generation_config.json"
    try:
        data = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise CtxextError(f"{path} is damaged: {error}") from error
    told = data.pop("max_length", None)
    return data if isinstance(told, int) and told < length else None
