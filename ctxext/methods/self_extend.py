"""Self-Extend: exact distances to the nearest keys, grouped ones beyond."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..rope import Rope, Schedule, static, target_length
from ..rope.encodings import Distances
from .registry import method


@dataclass(frozen=True)
class SelfExtend(Distances, kind="self_extend"):
    """d below the window; beyond it floor(i/group) - floor(j/group) + window - floor(window/group)."""

    group: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 1 or self.group != int(self.group):
            raise UsageError(f"the group must be a whole number of tokens, at least 1, got {self.group:g}")
        object.__setattr__(self, "group", int(self.group))

    def distance(self, query: int, key: int) -> int:
        if query - key < self.window:
            return query - key
        group = int(self.group)
        return query // group - key // group + self.window - self.window // group

    def largest(self, length: int) -> int:
        if length <= self.window:
            return length - 1
        return (length - 1) // int(self.group) + self.window - self.window // int(self.group)


@method(title="Self-Extend", paper="Jin et al. 2024, arXiv:2401.01325, section 3")
def self_extend(rope: Rope, factor: float, *, window: int | None = None, group: int | None = None) -> Schedule:
    """Exact distances to the nearest keys, coarser ones beyond: positions there are divided by a group size.

    d below the window; beyond it floor(i/G) - floor(j/G) + w - floor(w/G). By default a window of a quarter of the
    trained length L, and the smallest group that reaches the target: (sL - w) / (L - w), rounded up.
    """
    window = max(1, rope.trained_length // 4) if window is None else window
    if group is None:
        if window >= rope.trained_length:
            raise UsageError(f"a window of {window} tokens leaves nothing of the trained {rope.trained_length}")
        target = target_length(rope, factor)
        group = max(1, math.ceil((target - window) / (rope.trained_length - window)))
        # Rounding of the groups can cost one more.
        while SelfExtend(window, group).largest(target) > rope.trained_length - 1:
            group += 1
    rule = SelfExtend(window, group)
    rule.check_reach(target_length(rope, factor), rope.trained_length)
    return replace(static(rope, factor, [1.0] * rope.size), encoding=rule)
