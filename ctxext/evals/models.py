"""From what a user types to a model that is ready to be measured, and its control."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ctxext

from ..config import block
from ..config import read as hf_config
from ..errors import UsageError, check_choice
from ..files import read_config
from ..folders.adapter import fingerprint
from ..folders.heads import require_causal
from ..folders.load import load_tokenizer
from ..folders.source import TINY, ModelDtype, display_name, resolve
from ..rope import Rope, Schedule, unpatched

# Its folder also holds a README, which is not text to measure on.
TINY_TEXTS = sorted((TINY.parent / "text").glob("*.txt"))


@dataclass
class Subject:
    """A live model under measurement. `schedule` is what it runs, "none" for one that nothing was done to.

    weights: `ctxext.folders.adapter.fingerprint` of its folder; empty for a model that the caller loaded.
    asked_length: the trained length in tokens that the user gave instead of the config's; every patch keeps it.
    existing: what a patch does with a checkpoint that is scaled already; see `ctxext.patch`.
    native: the model as it was trained, if its config has a scaling that came with the weights.
    """

    name: str
    model: Any
    tokenizer: Any
    schedule: Schedule
    weights: str = ""
    asked_length: int | None = None
    existing: str = "refuse"
    native: Schedule | None = None
    _base: Schedule | None = None

    @property
    def trained_length(self) -> int:
        return (self.native or self.schedule).rope.trained_length

    def patch(self, method: str, factor: float, **params: Any) -> None:
        """Patch (or patch anew) the live model; see `ctxext.patch`."""
        self.schedule = ctxext.patch(self.model, method, factor, **{**self._given(), **params})

    def _given(self) -> dict[str, Any]:
        return {"trained_length": self.asked_length, "existing": self.existing}

    def unpatch(self) -> None:
        """Back to the model as its config says, or to what `start` has settled."""
        if ctxext.schedule_of(self.model) is not None:
            ctxext.unpatch(self.model)
        self.schedule = self.native or hf_config.read_schedule(self.model.config.to_dict(), self.asked_length)
        if self._base is not None:
            ctxext.apply(self.model, self._base)
            self.schedule = self._base

    def start(self) -> Rope:
        """Unpatch, and settle what that means for a scaled checkpoint: the rope that `existing` starts from.

        Returns that rope, which every patch is made from. Raises CtxextError for a scaled checkpoint if it says
        "refuse".
        """
        from ..live.patch import original_config

        rope = hf_config.read_rope(original_config(self.model), **self._given())
        self._base = None
        self.unpatch()
        if self.schedule.method != "none":
            self._base = unpatched(rope)
            self.unpatch()
        return rope

    @contextmanager
    def as_trained(self) -> Iterator[None]:
        """The same weights with the rope that they were trained with: what the crop control reads with."""
        mine = self.schedule
        if mine.method == "none":
            yield
            return
        if self.native is not None:
            ctxext.unpatch(self.model)
        else:
            ctxext.apply(self.model, unpatched(mine.rope))
        try:
            yield
        finally:
            ctxext.apply(self.model, mine)

    def identity(self) -> dict[str, Any]:
        """What figures of this model, as it is now, belong to: a name alone doesn't tell two models apart."""
        return {
            "model": self.name,
            "weights": self.weights,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": getattr(self.model.config, "_attn_implementation", None),
            "schedule": block.digest(self.schedule),
            "trained_length": self.trained_length,
            "existing": self.existing,
        }

    def description(self) -> dict[str, Any] | None:
        """The schedule as a result document holds it; None when unpatched."""
        return None if self.schedule.method == "none" else block.block(self.schedule)


def load(
    model: str | os.PathLike,
    *,
    method: str | None = None,
    factor: float = 1.0,
    params: dict[str, Any] | None = None,
    dtype: ModelDtype = "auto",
    attention: str = "auto",
    trained_length: int | None = None,
    existing: str = "refuse",
) -> Subject:
    """Load MODEL with its tokenizer, and patch it if a method is given.

    dtype "auto" takes the checkpoint's own, attention "auto" sdpa where the family has it. On a machine with CUDA
    devices the model goes to the one of this process (LOCAL_RANK). Raises CtxextError as `ctxext.load` and
    `ctxext.patch` do, and for a model that doesn't predict next tokens.
    """
    check_choice("dtype", dtype, ModelDtype)
    import torch

    from ..live.patch import original_config

    folder: Path = resolve(model)
    require_causal(read_config(folder), folder, "an evaluation")
    loaded = ctxext.load(folder, dtype=dtype, attn_implementation=attention).eval()
    if torch.cuda.is_available():
        loaded.to(f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}")
    tokenizer = load_tokenizer(folder)
    config = original_config(loaded)
    native = hf_config.native_schedule(config, trained_length)
    schedule = ctxext.schedule_of(loaded) or native or hf_config.read_schedule(config, trained_length)
    more = {"weights": fingerprint(folder), "asked_length": trained_length, "existing": existing, "native": native}
    subject = Subject(display_name(model), loaded, tokenizer, schedule, **more)
    if method is not None:
        subject.patch(method, factor, **(params or {}))
    return subject


def texts_for(model: Any, data: Sequence[str | Path] | None) -> Sequence[str | Path]:
    """What to measure `model` on; UsageError if nothing was given and it isn't `tiny`, which brings a text."""
    if data:
        return data
    if isinstance(model, (str, os.PathLike)) and os.fspath(model) == "tiny":
        return TINY_TEXTS
    raise UsageError("no text to measure on", hint="--data PATH, a text file or a folder of them")


def of_live(model: Any, tokenizer: Any) -> Subject:
    """A Subject around a model that was loaded, and perhaps patched, by the caller; a Subject as it is."""
    if isinstance(model, Subject):
        return model
    if tokenizer is None:
        raise UsageError("a live model needs its tokenizer")
    from ..live.patch import original_config

    config = original_config(model)
    native = hf_config.native_schedule(config)
    schedule = ctxext.schedule_of(model) or native or hf_config.read_schedule(config)
    return Subject(type(model).__name__, model.eval(), tokenizer, schedule, native=native)
