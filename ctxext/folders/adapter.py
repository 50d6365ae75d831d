"""Adapters that can't be misused: they carry the rope that they were trained with, and know their base.

A PEFT adapter holds neither. Loaded on the unpatched base it is silently wrong, so an adapter folder of ctxext
has, beside PEFT's files,

- `config.json`: the patched config, whose "ctxext" block says the schedule;
- a "ctxext" entry in `adapter_config.json`: the base, its fingerprint, its rope before, and the schedule's hash.

`ctxext.load` applies both and refuses another base or schedule. Plain PEFT doesn't know the entry, ignores it and
warns "Unexpected keyword arguments ['ctxext'] for class LoraConfig": that warning is how a wrong load is noticed.
`check(model, folder)` says for a live model, however it was loaded, whether it runs the adapter's schedule.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.block import digest, read_block
from ..config.keys import rope_parameters
from ..config.write import write_config
from ..errors import CtxextError
from ..files import WEIGHTS, write_text
from ..rope import Schedule
from .lengths import longer_config
from .weights import safetensors_header, tensor_files

CONFIG = "adapter_config.json"
_SAMPLE = 512


@dataclass(frozen=True)
class Base:
    """What an adapter remembers of the model it was trained on."""

    name: str
    fingerprint: str
    rope: dict[str, Any]

    @classmethod
    def of(cls, name: str, folder: Path) -> Base:
        return cls(name, fingerprint(folder), rope_parameters(_json(folder / "config.json")))


def is_adapter(folder: Path) -> bool:
    """Whether this folder is a PEFT adapter, ctxext's or not."""
    return (folder / CONFIG).is_file()


def fingerprint(folder: Path) -> str:
    """A hash that tells weights apart without reading them all: milliseconds, whatever the size.

    Of what from_pretrained reads, not of second copies beside it. For safetensors: every tensor's name, type and
    shape, and its first bytes, however they are spread over shards. Other formats: each file's size, beginning and
    end. Raises CtxextError for a folder without weights.
    """
    return _hash(tensor_files(folder) or _all_weights(folder), folder)


def _all_weights(folder: Path) -> list[Path]:
    safetensors = sorted(folder.glob("*.safetensors"))
    return safetensors or sorted(p for p in folder.iterdir() if p.suffix in WEIGHTS)


def _hash(files: Iterable[Path], folder: Path) -> str:
    lines: list[str] = []
    for path in files:
        if path.suffix == ".safetensors":
            header, start = safetensors_header(path)
            with path.open("rb") as file:
                for name, tensor in header.items():
                    begin, end = tensor["data_offsets"]
                    file.seek(start + begin)
                    sample = file.read(min(_SAMPLE, end - begin))
                    lines.append(
                        f"{name} {tensor['dtype']} {tensor['shape']} {hashlib.sha256(sample).hexdigest()}"
                    )
            continue
        size = path.stat().st_size
        with path.open("rb") as file:
            sample = file.read(1 << 20)
            file.seek(max(0, size - (1 << 20)))
            lines.append(f"{path.name} {size} {hashlib.sha256(sample + file.read()).hexdigest()}")
    if not lines:
        raise CtxextError(f"{folder} has no weights to recognise it by")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]


def seal(folder: Path, base: Base, base_config: Mapping[str, Any], schedule: Schedule | None) -> None:
    """Make the PEFT adapter in `folder` one that carries its rope and its base."""
    config = write_config(base_config, schedule) if schedule else dict(base_config)
    config = longer_config(config, schedule.max_length) if schedule else config
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    data = _json(folder / CONFIG)
    data["base_model_name_or_path"] = base.name
    data["ctxext"] = {
        "version": __version__,
        "load": "ctxext.load(folder): this adapter needs the rope in config.json beside it",
        "base": base.name,
        "fingerprint": base.fingerprint,
        "base_rope": base.rope,
        "digest": digest(schedule) if schedule else None,
    }
    write_text(folder / CONFIG, json.dumps(data, indent=2) + "\n")
    write_text(folder / "README.md", _card(base, schedule))


def _card(base: Base, schedule: Schedule | None) -> str:
    runs = "its base's own rope"
    if schedule is not None:
        runs = f"{schedule.method} x{schedule.factor:g}, {schedule.max_length:,} tokens"
    return f"""---
base_model: {Path(base.name).name if os.path.isabs(base.name) else base.name}
library_name: peft
tags: [ctxext, long-context]
---

# An adapter for {Path(base.name).name} with another rope

Trained by ctxext {__version__} with {runs}. It is right on exactly that base with exactly that rope:

```python
model = ctxext.load("this folder")         # applies both, and refuses another base
ctxext.merge("this folder", "out")         # a whole model for plain transformers and servers
```

Plain PEFT knows nothing of the rope. It warns `Unexpected keyword arguments ['ctxext']` and goes on; what comes
out is then silently wrong. `ctxext.folders.adapter.check(model, folder)` tells whether a live model runs the right
one.
"""


def read_adapter(folder: Path) -> tuple[dict[str, Any], Schedule | None]:
    """(the "ctxext" entry, the schedule); CtxextError if the folder isn't an adapter of ctxext or is damaged."""
    entry = _json(folder / CONFIG).get("ctxext") if is_adapter(folder) else None
    if not isinstance(entry, dict):
        raise CtxextError(
            f"{folder} doesn't say which rope it was trained with: it isn't an adapter that ctxext wrote",
            hint="load its base with ctxext, patch it as in training, and give that model to peft",
        )
    block = _json(folder / "config.json").get("ctxext")
    schedule = read_block(block) if block else None
    if (digest(schedule) if schedule else None) != entry["digest"]:
        raise CtxextError(
            f"{folder} was trained with another schedule than its config.json says", hint="restore config.json"
        )
    return entry, schedule


def check_base(folder: Path, entry: Mapping[str, Any], schedule: Schedule | None, base_folder: Path) -> None:
    """Raise CtxextError unless `base_folder` holds the adapter's base."""
    found = fingerprint(base_folder)
    # 0.1.0 hashed every file of weights in the folder.
    if entry["fingerprint"] not in (found, _hash(_all_weights(base_folder), base_folder)):
        raise CtxextError(
            f"{folder} was trained on other weights than those in {base_folder} "
            f"(fingerprint {entry['fingerprint'][:8]}, found {found[:8]})",
            hint=f"it was trained on {entry['base']}",
        )
    config = _json(base_folder / "config.json")
    block = config.get("ctxext")
    mine = (digest(schedule) if schedule else None, block["digest"] if block else None)
    if block and mine[0] == mine[1]:
        return
    if rope_parameters(config) != entry["base_rope"]:
        now = f"{block['method']} x{block['factor']:g}" if block else "another rope"
        wanted = f"{schedule.method} x{schedule.factor:g}" if schedule else "its base's own rope"
        raise CtxextError(
            f"{base_folder} runs {now}, the adapter was trained with {wanted}", hint="give the unpatched base"
        )


def check(model: Any, folder: str | os.PathLike) -> None:
    """Raise CtxextError if a live model, however it was loaded, doesn't run the schedule of this adapter."""
    from ..config.read import read_schedule
    from ..live.patch import find_decoder, schedule_of

    _, schedule = read_adapter(Path(folder))
    live = schedule_of(model) or read_schedule(find_decoder(model).rotary_emb.config.to_dict())
    wanted = schedule or read_schedule(_json(Path(folder) / "config.json"))
    if digest(live) != digest(wanted):
        raise CtxextError(
            f"this model runs {live.method} x{live.factor:g}, the adapter was trained with {wanted.method} "
            f"x{wanted.factor:g}",
            hint="load it with ctxext.load(adapter)",
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise CtxextError(f"{path} can't be read: {error}") from error
