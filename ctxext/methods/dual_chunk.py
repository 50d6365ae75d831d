"""Dual-chunk attention: text in chunks, distances kept within what was trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..rope import Rope, Schedule, static, target_length
from ..rope.encodings import Distances, at_least
from .registry import method


@dataclass(frozen=True)
class DualChunk(Distances, kind="dual_chunk"):
    """Keys have positions j mod chunk; a query has i mod chunk for keys of its own chunk, min(i mod chunk + chunk,
    chunk + window - 1) for those of the one before, chunk + window - 1 for older ones.
    """

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.chunk, 1, "the chunk")

    def distance(self, query: int, key: int) -> int:
        behind, last = query // self.chunk - key // self.chunk, self.chunk + self.window - 1
        start = query % self.chunk if behind == 0 else min(query % self.chunk + self.chunk, last)
        return (last if behind > 1 else start) - key % self.chunk

    def largest(self, length: int) -> int:
        return min(length - 1, self.chunk + self.window - 1)


@method(title="Dual-chunk attention", paper="An et al. 2024, arXiv:2402.17463, section 3")
def dual_chunk(rope: Rope, factor: float, *, chunk: int | None = None, window: int | None = None) -> Schedule:
    """Cut the text into chunks: exact distances within one and to the end of the one before, the largest beyond.

    With L trained tokens, chunks of s = 3L/4 and a local window w = L - s by default: a query has position i mod
    s for its own chunk, min(i mod s + s, s + w - 1) for the one before, and s + w - 1 for older ones; keys have
    j mod s.
    """
    if chunk is None:
        chunk = max(1, rope.trained_length * 3 // 4)
    if window is None:
        window = max(1, rope.trained_length - chunk)
    rule = DualChunk(window, chunk)
    rule.check_reach(target_length(rope, factor), rope.trained_length)
    return replace(static(rope, factor, [1.0] * rope.size), encoding=rule)
