"""Sinusoids of the position added to the input embeddings, and nothing rotates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static
from ..rope.encodings import Encoding
from .registry import method


@dataclass(frozen=True)
class Sinusoids(Encoding, kind="sinusoidal"):
    """Sinusoids added to the input embeddings, times `scale`; `base` is the longest period over 2 pi."""

    in_attention = False

    base: float = 10000.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.base <= 1:
            raise UsageError(f"the base of the sinusoids must be greater than 1, got {self.base}")

    def frequencies(self, width: int) -> list[float]:
        """base^(-2i/d) for i in 0 .. d/2 - 1: coordinate 2i is the sine, 2i + 1 the cosine of position times this
        (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""
        return [self.base ** (-2 * i / width) for i in range((width + 1) // 2)]

    def describe(self, trained_length: int) -> str:
        return f"Sinusoids times {self.scale:g} are added to the input embeddings."


@method(title="Sinusoidal", paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.5", replaces_rope=True)
def sinusoidal(rope: Rope, factor: float, *, base: float = 10000.0, scale: float = 1.0) -> Schedule:
    """Add sines and cosines of the position to the input embeddings; no rotation.

    Coordinate 2i gets scale sin(p base^(-2i/d)), 2i + 1 the cosine, d being the hidden size. The paper's
    embeddings are about as large as the table; for a model with small ones choose a smaller scale.
    """
    return replace(static(rope, factor, [0.0] * rope.size), encoding=Sinusoids(base, scale))
