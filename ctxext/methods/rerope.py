"""ReRoPE: exact distances up to a window, the same or slowly growing ones beyond."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static, target_length
from ..rope.encodings import Distances
from .registry import method


@dataclass(frozen=True)
class ReRoPE(Distances, kind="rerope"):
    """d below the window, else the window, plus (d - window) / step if a step is given (its leaky form)."""

    step: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step and self.step < 1:
            raise UsageError(f"the step of distances beyond the window must be at least 1, got {self.step:g}")

    def distance(self, query: int, key: int) -> float:
        beyond = query - key - self.window
        return query - key if beyond < 0 else self.window + (beyond / self.step if self.step else 0)

    def largest(self, length: int) -> float:
        if length <= self.window:
            return length - 1
        return self.window + ((length - 1 - self.window) / self.step if self.step else 0)


@method(title="ReRoPE", paper="Su 2023, Rectified Rotary Position Embeddings (and its leaky form)")
def rerope(rope: Rope, factor: float, *, window: int | None = None, step: float | None = None) -> Schedule:
    """Exact distances up to a window, and that same distance for every key beyond.

    min(d, w), by default with half of the trained length as the window. With a step k (Leaky ReRoPE) distances
    go on growing, w + (d - w) / k.
    """
    window = max(1, rope.trained_length // 2) if window is None else window
    if factor == 1 and step is None:
        window = rope.trained_length  # every distance of the target is below it
    if step is None and window >= rope.trained_length and factor > 1:
        raise UsageError(f"a window of {window} tokens was never seen in training", hint="a smaller window")
    rule = ReRoPE(window, step or 0.0)
    rule.check_reach(target_length(rope, factor), rope.trained_length)
    return replace(static(rope, factor, [1.0] * rope.size), encoding=rule)
