"""No rotation: in every layer, or in some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from ..rope.encodings import Encoding
from .registry import method


@dataclass(frozen=True)
class UnrotatedLayers(Encoding, kind="unrotated"):
    """Layers that don't rotate, numbered from 0: those listed, or every n-th (every=4: layers 3, 7, 11, ...)."""

    in_attention = False

    listed: tuple[int, ...] = ()
    every: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "listed", tuple(sorted(set(self.listed))))
        if bool(self.listed) == bool(self.every):
            raise UsageError("say which layers: either a list of them, or every n-th", hint="--set every=4")
        if self.every < 0 or any(i < 0 for i in self.listed):
            raise UsageError("layers are numbered from 0")

    def of(self, count: int) -> list[int]:
        """Their numbers in a model of `count` layers; UsageError if it has no such layer."""
        if self.every:
            found = list(range(self.every - 1, count, self.every))
            if not found:
                raise UsageError(f"a model of {count} layers has no layer {self.every}, counted from 1")
            return found
        if self.listed[-1] >= count:
            raise UsageError(f"there is no layer {self.listed[-1]}: the model has {count}, counted from 0")
        return list(self.listed)

    def describe(self, trained_length: int) -> str:
        which = f"Every layer whose number is a multiple of {self.every}, from 1," if self.every else ""
        which = which or f"Layers {', '.join(map(str, self.listed))}, from 0,"
        return f"{which} doesn't rotate; the config says so as SmolLM3's does."


@method(
    title="NoPE",
    paper="Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466; some layers: SmolLM3",
    replaces_rope=True,
)
def nope(rope: Rope, factor: float, *, layers: list[int] | None = None, every: int | None = None) -> Schedule:
    """Stop all rotation: no position encoding but the causal mask; or stop it in some layers only.

    f'_i = 0, whatever the factor, which only says how long the model is meant to read. A model trained
    with RoPE is lost right after this; DroPE recovers it by a recalibration at the original length.
    layers (numbered from 0) or every n-th (every=4: 3, 7, ...) leaves the rotation of the others as it was; such a
    Llama is written as a SmolLM3, which has this choice in its config.
    """
    if layers is None and every is None:
        return static(rope, factor, [0.0] * rope.size)
    if every is not None and every < 1:
        raise UsageError(f"every must be at least 1, got {every}")
    kept = static(rope, factor, [1.0] * rope.size, native={"rope_type": "default"})
    return replace(kept, encoding=UnrotatedLayers(tuple(layers or ()), every or 0))
