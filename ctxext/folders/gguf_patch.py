"""Patch a GGUF file as it is: the quantised weights stay, only what it says about its rope changes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import methods
from ..config.read import Existing, read_rope
from ..config.rope_parameters import Fallback
from ..errors import CtxextError, check_choice, warn
from ..files import replacing_file, settled
from ..rope import Schedule
from ..runtimes.gguf_file import metadata, read_gguf, tensor, write_changed
from ..runtimes.gguf_rope import READS_TABLE, TENSOR, GgufRope, config_of, gguf_rope, is_scaling_key
from .source import display_name


@dataclass(frozen=True)
class PatchedGguf:
    """What `patch_gguf` did (or would do): where, with which schedule, and what the file says now."""

    out: Path
    schedule: Schedule
    rope: GgufRope


def patch_gguf(
    source: str | os.PathLike,
    out: str | os.PathLike | None = None,
    *,
    method: str,
    factor: float,
    force: bool = False,
    dry_run: bool = False,
    trained_length: int | None = None,
    existing: Existing = "refuse",
    fallback: Fallback = "refuse",
    **params: Any,
) -> PatchedGguf:
    """Write a patched copy of a GGUF file, its weights and every key that isn't about the rope byte for byte.

    out: the new file, by default ./<model>-<method>-<factor>x.gguf. trained_length, existing: see `ctxext.patch`.
    fallback: "static" writes a staged schedule's last stage, which is all that llama.cpp can run of it.
    Written to a temporary sibling and renamed. Raises CtxextError for a file that can't be patched (see
    `gguf_rope.gguf_rope`), UsageError for wrong options.
    """
    check_choice("fallback", fallback, Fallback)
    source = Path(source).expanduser()
    target = Path(out) if out is not None else Path(f"{display_name(source)}-{method}-{factor:g}x.gguf")
    if settled(target).exists() and target.samefile(source):
        raise CtxextError(f"{target} is the file to patch", hint="write to another file with -o")
    methods.get(method).check(params)
    reader = read_gguf(source)
    keys = metadata(reader)
    table = tensor(reader, TENSOR)
    arch = keys["general.architecture"]
    if arch not in READS_TABLE:
        raise CtxextError(
            f"can't patch a GGUF of architecture {arch!r}: nobody ran llama.cpp's rope for it against ours",
            hint=f"known are {', '.join(READS_TABLE)}",
        )
    config = config_of(keys, None if table is None else table.data.tolist())
    rope = read_rope(config, trained_length=trained_length, existing=existing)
    schedule = methods.schedule(rope, method, factor, **params)
    if keys.get(f"{arch}.attention.sliding_window"):
        warn(f"the file limits attention to {keys[f'{arch}.attention.sliding_window']} tokens in some layers")
    rope_keys = gguf_rope(schedule, arch, fallback)
    done = PatchedGguf(target, schedule, rope_keys)
    if dry_run:
        return done
    changes = rope_keys.prefixed(arch)
    freqs = rope_keys.freqs
    if freqs is None and table is not None:
        # A tensor can't be taken out without moving all others; ones divide nothing.
        freqs = (1.0,) * int(table.n_elements)
    stale = frozenset(key for key in keys if is_scaling_key(key, arch))
    with replacing_file(target, force=force) as file:
        write_changed(reader, source, file, changes=changes, drop=stale, table=(TENSOR, freqs) if freqs else None)
    return done
