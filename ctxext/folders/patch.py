"""Write a patched copy of a model folder, without loading its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
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
from ..files import (
    WEIGHTS,
    check_overwrite,
    link_or_copy,
    model_files,
    read_config,
    replacing,
    settled,
    write_text,
)
from ..rope import Schedule
from ..runtimes.facts import target as runtime_target
from ..runtimes.portability import portability
from .card import model_card
from .lengths import longer_config, longer_files
from .source import SourceDtype, display_name, is_gguf, peek, resolve
from .weights import check_weights, native_copy, second_copies, within


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
    """What `patch_checkpoint` did: where, with which schedule, and how the weights came along.

    left_out: copies of the model in the source that the schedule wouldn't reach; see `weights.second_copies`.
    """

    out: Path
    schedule: Schedule
    config: dict[str, Any]
    linked_bytes: int
    copied_bytes: int
    left_out: tuple[str, ...] = ()


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
    """config.json for `schedule`, without a window or a second length that would hide what it reaches.

    Options: see `Request`.
    """
    new = write_config(config, schedule, fallback=fallback, target=runtime_target(target))
    new = longer_config(new, schedule.max_length)
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
    check_target(whole(src, folder), out, force)
    return write_patched(folder, out, schedule, config, name=display_name(src), force=force, link=link)


def check_target(source: Path, target: Path, force: bool, what: str = "the model to patch") -> None:
    """Raise CtxextError if what is made of `source`, a model folder or file, can't become the folder `target`.

    what: the source, in words. Asked before any work is done.
    """
    mine, goal = settled(source), settled(target)
    if goal.exists() and mine.is_relative_to(goal):
        raise CtxextError(f"{target} is, or holds, {what}", hint="write to another folder with -o")
    if goal.is_relative_to(mine):
        raise CtxextError(
            f"{target} lies inside {what}, whose files it would hold next time",
            hint="write to another folder with -o",
        )
    check_overwrite(goal, force)


def whole(model: str | os.PathLike, folder: Path) -> Path:
    """What MODEL is on this machine: a .gguf file, or its folder."""
    return Path(model) if is_gguf(model) else folder


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
    written = {**longer_files(folder, schedule.max_length), "config.json": config}
    copies = second_copies(folder)
    left_out = named(folder, copies)
    linked = copied = 0
    with replacing(target, force=force) as temporary:
        for relative in model_files(folder):
            # The source's own card describes the source; it stays readable under another name.
            renamed = Path("README.base.md") if str(relative) == "README.md" else relative
            if str(relative) in written or within(relative, copies):
                continue
            size = (folder / relative).stat().st_size
            if link_or_copy(folder / relative, temporary / renamed, link=link and relative.suffix in WEIGHTS):
                linked += size
            else:
                copied += size
        for file, data in written.items():
            # As it was but for the length: json's own Infinity too, which some configs hold.
            write_text(temporary / file, json.dumps(data, indent=2) + "\n")
        verdicts = portability(config, folder="this-folder", native=native_copy(temporary))
        card = model_card(name, schedule, config, verdicts=verdicts, left_out=left_out)
        write_text(temporary / "README.md", card)
    return Patched(target, schedule, dict(config), linked, copied, left_out)


def named(folder: Path, copies: Iterable[Path]) -> tuple[str, ...]:
    """`second_copies` of a folder by name; a folder ends in a slash."""
    return tuple(f"{place}/" if (folder / place).is_dir() else str(place) for place in copies)


def preview(
    model: str | os.PathLike, request: Request, *, dtype: SourceDtype = "bfloat16"
) -> tuple[Schedule, dict[str, Any]]:
    """The schedule and config.json that `patch_checkpoint` would write; a .gguf is looked at by its header."""
    if not is_gguf(model):
        return plan(model, request, dtype=dtype)[1:]
    check_choice("dtype", dtype, SourceDtype)
    request.check()
    return request.for_config(peek(model))


def check_out(model: str | os.PathLike, out: Path, force: bool) -> tuple[str, ...]:
    """What a patched copy of MODEL in `out` would leave out, by name; CtxextError if it can't be written there."""
    if is_gguf(model):
        check_target(Path(model), out, force)
        return ()
    folder = resolve(model)
    check_target(folder, out, force)
    return named(folder, second_copies(folder))
